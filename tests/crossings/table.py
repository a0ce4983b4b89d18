"""The table of capabilities."""

from tests.crossings.capability import Capability
from tests.crossings.engine_settings import SETTINGS
from tests.crossings.incidents import INCIDENTS
from tests.crossings.layouts import LAYOUTS
from tests.crossings.request_fields import FIELDS
from tests.crossings.server_capabilities import AT_SERVER

ENTRIES: list[Capability] = [*LAYOUTS, *SETTINGS, *FIELDS, *INCIDENTS, *AT_SERVER]
TABLE = {one.name: one for one in ENTRIES}
