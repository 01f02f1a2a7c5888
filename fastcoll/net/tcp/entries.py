"""Every compiled entry of net/tcp, for ahead-of-time compilation. A test finds entries that are missing here."""

from __future__ import annotations

from ...compiler.jit import Entry
from . import executor as engine
from . import mail_kernels

ENTRIES: tuple[Entry, ...] = (
    engine.collective,
    engine.after_mismatch,
    engine.settle,
    mail_kernels.send,
    mail_kernels.receive,
    mail_kernels.post_send,
    mail_kernels.post_receive,
    mail_kernels.complete,
    mail_kernels.begin,
    mail_kernels.rest,
    mail_kernels.accept,
    mail_kernels.acknowledge,
    mail_kernels.advance,
    mail_kernels.flush,
    mail_kernels.flush_deferred,
)
