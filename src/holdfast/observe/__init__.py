"""What people see: everything here is folded from facts, so that no two views of a run can disagree."""
