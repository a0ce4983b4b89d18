"""Chat templates in the forms that models publish: each uses the constructs of its family.

`oddments` has what the others leave out: documents, macros, loop controls, the generation tag, sorted and compact JSON.
"""

from pathlib import Path

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
