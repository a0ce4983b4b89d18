"""Certificates of the server."""

import ssl
from pathlib import Path

from quire.errors import InvalidSetting
from quire.files.regular_file import read_regular
from quire.server.settings import ServerSettings


def check_certificate(settings: ServerSettings) -> None:
    """Refuse files that no connection could be made with; workers read them again."""
    certfile, keyfile, password = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password
    if certfile is None:
        return
    for name, file in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        _check_readable(name, file)

    def given_password() -> str:
        if password is None:
            raise InvalidSetting(f"the key in {keyfile or certfile} is encrypted; give --ssl-keyfile-password")
        return password

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, given_password)
    except ssl.SSLError as error:
        raise InvalidSetting(_problem(error, certfile, keyfile, password)) from error


def _check_readable(name: str, file: Path | None) -> None:
    try:
        if file is not None:
            read_regular(file)
    except OSError as error:
        raise InvalidSetting(f"{name} is {file}: it cannot be read: {error.strerror}") from error


def _problem(error: ssl.SSLError, certfile: Path, keyfile: Path | None, password: str | None) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile is {keyfile or certfile}: its key is not that of the certificate in {certfile}"
    if password is not None and error.reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ", None):
        return f"ssl_keyfile_password does not open the key in {keyfile or certfile}"
    where = f"{certfile} and {keyfile}" if keyfile is not None else f"{certfile}, which must hold the key as well,"
    return f"ssl_certfile and ssl_keyfile: {where} are not a certificate and its key in PEM form"
