"""What the HTTP library logs about clients, in fewer words."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError


def http_logger() -> logging.Logger:
    """The logger for aiohttp's server: a client's fault is no error of ours and needs no traceback."""
    logger = logging.getLogger("jaxpaged.server.http")
    if _client_faults not in logger.filters:
        logger.addFilter(_client_faults)
    return logger


def _client_faults(record: logging.LogRecord) -> bool:
    """Drops connections that broke off, and makes one short line of what is not HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (ConnectionError, web.RequestPayloadError)):
        return False
    if isinstance(error, HttpProcessingError):
        reason = " ".join(error.message.split())
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "refused what is not HTTP: %.200s", (reason,)
        record.exc_info = record.exc_text = None
    return True
