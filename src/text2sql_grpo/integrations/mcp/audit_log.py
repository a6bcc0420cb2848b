from text2sql_grpo.contrib.mcp.audit_log import AuditLog as AuditLog
