"""The same environment in other packages; each module needs its package installed."""
