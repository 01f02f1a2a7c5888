"""Several hosts on one machine, for tests of what ranks on different machines do."""
