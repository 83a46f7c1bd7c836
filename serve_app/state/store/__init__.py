"""What gateways share, in SQL: an SQLite file of the node, or a PostgreSQL server of the cluster. All calls block."""
