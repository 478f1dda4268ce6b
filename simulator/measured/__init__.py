"""What was measured elsewhere: tables of kernels and runs of servers, factors fitted on them, and how far
the predictions are from them."""
