"""The flight record of a process: its groups and their last calls, in memory that other processes can read."""
