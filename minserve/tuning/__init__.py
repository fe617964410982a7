"""What an engineer tunes, and on what: workloads, their public traces, a cost model of steps, prices."""
