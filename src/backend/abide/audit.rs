//! Audit client: pages of a gateway's audit log.

use super::{Abide, BackendError, escaped, read};
use crate::contract::{AuditPage, AuditVerification};

/// Selection of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    pub namespace: Option<String>,
    pub who: Option<String>,
    /// In RFC 3339.
    pub since: Option<String>,
    /// Entries after this number only.
    pub after: u64,
}

impl Abide {
    /// A page of entries.
    pub async fn audit(&self, filter: &AuditFilter) -> Result<AuditPage, BackendError> {
        let mut path = format!("/api/abide/v1/audit?after={}", filter.after);
        let named = [("namespace", &filter.namespace), ("who", &filter.who), ("since", &filter.since)];
        for (name, value) in named {
            if let Some(value) = value {
                path.push_str(&format!("&{name}={}", escaped(value)));
            }
        }
        read(&self.get(&path).await?)
    }

    pub async fn verify_audit(&self) -> Result<AuditVerification, BackendError> {
        read(&self.get("/api/abide/v1/audit/verify").await?)
    }
}
