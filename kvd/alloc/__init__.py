"""The books (`ledger`) and the pools of device memory (`exact_pool`, `best_fit_pool`)."""
