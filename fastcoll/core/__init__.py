"""What every backend shares: the group, the contract of backends, operations, Work, the monitor of peers."""
