//! Audit entries that an app or a person may read.
//!
//! A caller with every namespace, host and owner reads all entries. Another caller reads entries about instances of its grant,
//! with these instances only, and its own calls.

use super::{AuditQuery, read_page, verify};
use crate::access::Grant;
use crate::contract::{AuditAction, AuditEntry, AuditInstances, AuditPage, AuditVerification};
use crate::gateway::{ApiError, Gateway};
use crate::model::{HostKey, InstanceKey, ProcessKey};
use crate::store::Store;

/// The part of an entry that an app may see.
pub fn visible_entry(grant: &Grant, entry: AuditEntry) -> Option<AuditEntry> {
    let is_own = entry.who.kind == grant.principal.kind() && entry.who.name == grant.principal.code();
    if grant.sees_everything() || is_own {
        return Some(entry);
    }
    let owner = entry.purpose.owner.clone();
    let owner = Some(owner.as_str()).filter(|owner| !owner.is_empty());
    let all = entry.what.instances.iter().map(|one| one.hosts.len().max(1)).sum::<usize>();
    let shown: Vec<AuditInstances> =
        entry.what.instances.iter().filter_map(|one| visible_instances(grant, one, owner)).collect();
    let count = shown.iter().map(|one| one.hosts.len().max(1)).sum::<usize>();
    match count {
        0 => None,
        _ if count == all => Some(entry),
        // Other texts of the entry may name the instances of others.
        _ => {
            let mut entry = entry;
            let AuditAction { call, task, .. } = entry.what;
            entry.what = AuditAction { call, task, instances: shown, ..AuditAction::default() };
            entry.result.message.clear();
            let is_shown =
                |instance: &str| instance.parse::<InstanceKey>().is_ok_and(|key| grant.may_see(&key, owner));
            entry.result.failed.retain(|row| is_shown(&row.instance));
            Some(entry)
        }
    }
}

fn visible_instances(grant: &Grant, one: &AuditInstances, owner: Option<&str>) -> Option<AuditInstances> {
    let Some(namespace) = one.process.strip_suffix("/*") else {
        let process: ProcessKey = one.process.parse().ok()?;
        let is_seen = |host: &&String| {
            let key =
                |host| InstanceKey { host, namespace: process.namespace.clone(), name: process.name.clone() };
            host.parse::<HostKey>().is_ok_and(|host| grant.may_see(&key(host), owner))
        };
        let hosts: Vec<String> = one.hosts.iter().filter(is_seen).cloned().collect();
        return (!hosts.is_empty()).then(|| AuditInstances { hosts, ..one.clone() });
    };
    grant.check_namespace(namespace).ok()?;
    let is_seen = |host: &&String| host.parse::<HostKey>().is_ok_and(|host| grant.check_host(&host).is_ok());
    let hosts: Vec<String> = one.hosts.iter().filter(is_seen).cloned().collect();
    (!hosts.is_empty() || one.hosts.is_empty()).then(|| AuditInstances { hosts, ..one.clone() })
}

impl<S: Store> Gateway<S> {
    /// A page of entries that the app may read.
    pub async fn audit_page(&self, query: AuditQuery, grant: &Grant) -> Result<AuditPage, ApiError> {
        let grant = grant.clone();
        self.read_audit(move |folder| read_page(folder, &query, |entry| visible_entry(&grant, entry))).await
    }

    /// Verifies all files against the anchor.
    pub async fn verify_audit(&self) -> Result<AuditVerification, ApiError> {
        let Some(audit) = self.audit() else { return Err(no_audit()) };
        let mut anchor = audit.last_anchor().await;
        loop {
            let known = anchor.clone();
            let done = self.read_audit(move |folder| verify(folder, known.as_ref())).await?;
            let now = audit.last_anchor().await;
            // A file may have been rotated away meanwhile.
            if done.intact || now == anchor {
                return Ok(done);
            }
            anchor = now;
        }
    }

    async fn read_audit<T: Send + 'static>(
        &self,
        read: impl FnOnce(&std::path::Path) -> Result<T, super::AuditError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let Some(audit) = self.audit() else { return Err(no_audit()) };
        let busy = |_| ApiError::Busy("too many concurrent reads of the audit log".to_owned());
        let _reader = audit.readers.try_acquire().map_err(busy)?;
        let folder = audit.folder.clone();
        let failed = |why: String| ApiError::AuditFailed(why);
        let done = tokio::task::spawn_blocking(move || read(&folder)).await;
        done.map_err(|error| failed(error.to_string()))?
            .map_err(|error| failed(crate::error_chain::chain(&error)))
    }
}

fn no_audit() -> ApiError {
    ApiError::BadRequest("this gateway has no audit log".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{AccessRole, Principal};

    fn entry(app: &str, instances: &[(&str, &[&str])]) -> AuditEntry {
        let mut entry = AuditEntry::default();
        (entry.who.kind, entry.who.name) = ("app".to_owned(), app.to_owned());
        entry.what.detail = "db/api".to_owned();
        let hosts = |hosts: &[&str]| hosts.iter().map(|host| (*host).to_owned()).collect();
        entry.what.instances = instances
            .iter()
            .map(|(process, on)| AuditInstances {
                process: (*process).to_owned(),
                op: String::new(),
                hosts: hosts(on),
            })
            .collect();
        entry
    }

    #[test]
    fn a_scoped_app_sees_its_own_instances_and_its_own_calls() {
        let all = Grant::everything("ci");
        let grant = Grant {
            role: AccessRole::Admin,
            namespaces: vec!["web".to_owned()],
            hosts: vec!["0:10.0.0.1".to_owned()],
            ..all.clone()
        };
        let many =
            entry("other", &[("web/api", &["0:10.0.0.1", "0:10.0.0.12"]), ("web2/api", &["0:10.0.0.1"])]);
        let shown = visible_entry(&grant, many.clone()).expect("a part of it");
        assert_eq!(shown.what.instances, entry("", &[("web/api", &["0:10.0.0.1"])]).what.instances);
        assert_eq!(shown.what.detail, "", "the text names another namespace");
        // A person's own calls are not those of an app with its name.
        let person = Grant { principal: Principal::Person("ann".to_owned()), ..grant.clone() };
        let mut own = entry("person:ann", &[]);
        assert_eq!(visible_entry(&person, own.clone()), None);
        own.who.kind = "person".to_owned();
        assert_eq!(visible_entry(&person, own.clone()), Some(own));
        assert_eq!(visible_entry(&all, many.clone()), Some(many));
        for foreign in ["web2/*", "Web/api", "we/api"] {
            let hosts: &[&str] = if foreign.ends_with('*') { &[] } else { &["0:10.0.0.1"] };
            assert_eq!(visible_entry(&grant, entry("other", &[(foreign, hosts)])), None, "{foreign}");
            assert!(visible_entry(&grant, entry("ci", &[(foreign, hosts)])).is_some(), "its own call");
        }
        assert_eq!(visible_entry(&grant, entry("other", &[])), None, "no instance");
        assert!(visible_entry(&grant, entry("other", &[("web/*", &[])])).is_some());
    }
}
