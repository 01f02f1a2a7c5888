"""How ranks find one another: init_method URLs, launchers' variables, meetings in a store, and connections."""

from __future__ import annotations

from .init_method import has_handler, meet, register_rendezvous_handler, rendezvous

__all__ = ["has_handler", "meet", "register_rendezvous_handler", "rendezvous"]
