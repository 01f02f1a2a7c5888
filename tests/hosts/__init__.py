"""Several hosts on one machine, for tests with ranks on different machines."""
