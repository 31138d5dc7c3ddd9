"""SchedulerAgent: a device and a reason for every operator, and transfers where neighbours sit apart."""
