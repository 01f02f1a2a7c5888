"""The flight record of a process's groups: its layout, its writer, its dump."""
