"""Every entry of this room, for whoever wants them compiled ahead. A test finds those that are missing here."""

from __future__ import annotations

from ...kernels.jit import Entry
from ..mpi import kernels as mpi_kernels
from ..mpi import meet_kernels as mpi_meet_kernels
from . import engine, mail_answers, mail_kernels

ENTRIES: tuple[Entry, ...] = (
    engine.collective,
    engine.after_mismatch,
    mail_kernels.send,
    mail_kernels.receive,
    mail_kernels.begin,
    mail_kernels.rest,
    mail_kernels.accept,
    mail_kernels.acknowledge,
    mail_kernels.advance,
    mail_answers.flush,
    mail_answers.mind,
    mpi_kernels.poll,
    mpi_meet_kernels.meet,
    mpi_meet_kernels.carry_out,
    mpi_kernels.reduce,
    mpi_kernels.address,
)
