//! The handlers that come with the program: `sql` and `exec`, and the choice of the handler for a job.
