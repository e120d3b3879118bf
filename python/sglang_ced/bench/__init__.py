"""Agent workloads: traces, their replay through aiperf, and reports. Knows servers by HTTP alone."""
