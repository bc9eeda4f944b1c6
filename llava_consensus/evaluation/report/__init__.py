"""Reports: pure functions of result files and of a reduction's bookkeeping. Only the command line imports them."""
