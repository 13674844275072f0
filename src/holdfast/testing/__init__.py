"""What tests and users may use to try their luck: the simulator, the contracts of engines and stores, injected
faults.
"""
