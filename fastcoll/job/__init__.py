"""A job: its ranks and their groups; how ranks join the job, leave it, and recover after the death of a rank."""
