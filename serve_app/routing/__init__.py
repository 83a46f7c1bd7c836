"""Which workers a request goes to, and when: pure policy, without clock, network or Ray. Time is an argument."""
