"""A job: its members, its groups, how ranks join, leave and recover."""
