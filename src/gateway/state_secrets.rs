//! Secrets in controller state: a caller with role `read` gets no secret and no plain digest of one.
//!
//! The spec of a ledger entry or a journaled call has keyed digests in place of its secrets. A stored manifest is a text, and a
//! variable can hold a value far from its use: once any text of an owner may declare a secret, none is readable.
//! Controllers need role `operate`, and get everything, for a rollback.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::state::without_target;
use super::{ApiError, Gateway};
use crate::access::{AccessRole, Grant};
use crate::model::{DigestKey, SpecRevision, secret_digest};
use crate::store::{Change, Entry, KeyScope, Store};

/// Manifests declare a secret with this word.
const MARKER: &[u8] = b"secret";

/// Kinds of content of a key's value.
enum StateContent {
    /// A text of a stored revision, or the hosts of an inventory: the prefix of the owner's texts.
    ManifestText(String),
    /// Specs in JSON.
    Specs,
    /// A suspended instance, with a digest of its declaration.
    Suspended,
    Other,
}

impl StateContent {
    fn of_key(key: &str) -> StateContent {
        let rest = without_target(key);
        match rest.split_once('/').map(|(family, _)| family) {
            Some("snap") => {
                // Variables of a host are as private as the texts that use them.
                let of_owner = |before: &str| {
                    ["/text", "/inventory"].iter().find_map(|end| before.strip_suffix(end)).map(str::to_owned)
                };
                match key.rsplit_once('/').and_then(|(before, _)| of_owner(before)) {
                    Some(owner) => StateContent::ManifestText(format!("{owner}/text/")),
                    None => StateContent::Other,
                }
            }
            Some("journal" | "ledger") => StateContent::Specs,
            Some("left") => StateContent::Suspended,
            _ => StateContent::Other,
        }
    }
}

/// Redacts the values that one request reads.
pub(super) struct StateReader<'a, S> {
    gateway: &'a Gateway<S>,
    /// The caller gets values as they are stored.
    sees_secrets: bool,
    /// Prefixes of texts, and whether one of them may declare a secret; of the values that are read now.
    texts: BTreeMap<String, bool>,
}

impl<'a, S: Store> StateReader<'a, S> {
    pub(super) fn new(gateway: &'a Gateway<S>, grant: &Grant) -> StateReader<'a, S> {
        let sees_secrets = grant.check_role(AccessRole::Operate).is_ok();
        StateReader { gateway, sees_secrets, texts: BTreeMap::new() }
    }

    /// An entry that a request names. A text that may contain a secret is refused.
    pub(super) async fn entry(
        &mut self,
        grant: &Grant,
        entry: Option<Entry>,
    ) -> Result<Option<Entry>, ApiError> {
        let Some(entry) = entry else { return Ok(None) };
        let readable = self.entries(vec![entry]).await?.pop();
        if readable.is_none() {
            grant.check_role(AccessRole::Operate)?;
        }
        Ok(readable)
    }

    /// Refuses the prefix of texts that may contain a secret.
    pub(super) async fn check_prefix(&mut self, grant: &Grant, prefix: &str) -> Result<(), ApiError> {
        if !self.sees_secrets
            && let StateContent::ManifestText(texts) = StateContent::of_key(prefix)
            && self.may_have_secrets(texts).await?
        {
            grant.check_role(AccessRole::Operate)?;
        }
        Ok(())
    }

    /// The entries of a list; those that the caller may not read are left out.
    pub(super) async fn entries(&mut self, entries: Vec<Entry>) -> Result<Vec<Entry>, ApiError> {
        if self.sees_secrets {
            return Ok(entries);
        }
        self.texts.clear();
        let mut readable = Vec::with_capacity(entries.len());
        for entry in entries {
            if let Some(value) = self.value(&entry.key, &entry.value).await? {
                readable.push(Entry { value, ..entry });
            }
        }
        Ok(readable)
    }

    /// The same for changes. Deletions have no value.
    pub(super) async fn changes(&mut self, changes: Vec<Change>) -> Result<Vec<Change>, ApiError> {
        if self.sees_secrets {
            return Ok(changes);
        }
        self.texts.clear();
        let mut readable = Vec::with_capacity(changes.len());
        for change in changes {
            let Some(stored) = &change.value else {
                readable.push(change);
                continue;
            };
            if let Some(value) = self.value(&change.key, stored).await? {
                readable.push(Change { value: Some(value), ..change });
            }
        }
        Ok(readable)
    }

    /// `None`: the caller may not read the value.
    async fn value(&mut self, key: &str, stored: &Arc<[u8]>) -> Result<Option<Arc<[u8]>>, ApiError> {
        match StateContent::of_key(key) {
            StateContent::Other => Ok(Some(Arc::clone(stored))),
            StateContent::ManifestText(texts) => {
                let has_secrets = has_marker(stored) || self.may_have_secrets(texts).await?;
                Ok((!has_secrets).then(|| Arc::clone(stored)))
            }
            StateContent::Suspended => Ok(changed(stored, |fields| {
                if let Some(asked) = fields.get_mut("asked") {
                    *asked = json!("");
                }
            })),
            StateContent::Specs => {
                let Some(root) = self.gateway.secret_root().await else { return Ok(None) };
                let of_key = match KeyScope::of_key(key) {
                    Some(KeyScope::Owner(owner)) => Some(owner),
                    _ => None,
                };
                Ok(changed(stored, |fields| {
                    let of_value = fields.get("owner").and_then(Value::as_str);
                    let key = DigestKey::of_owner(&root, of_key.or(of_value).unwrap_or_default());
                    redact(fields, &key);
                }))
            }
        }
    }

    async fn may_have_secrets(&mut self, texts: String) -> Result<bool, ApiError> {
        if let Some(known) = self.texts.get(&texts) {
            return Ok(*known);
        }
        let page = self.gateway.store.range(&texts, None, usize::MAX).await?;
        let found = page.entries.iter().any(|entry| has_marker(&entry.value));
        self.texts.insert(texts, found);
        Ok(found)
    }
}

fn has_marker(text: &[u8]) -> bool {
    text.windows(MARKER.len()).any(|part| part == MARKER)
}

/// A changed JSON object. `None`: the value is not one, so that nothing is known of it.
fn changed(stored: &[u8], change: impl FnOnce(&mut Map<String, Value>)) -> Option<Arc<[u8]>> {
    let mut fields: Map<String, Value> = serde_json::from_slice(stored).ok()?;
    change(&mut fields);
    Some(serde_json::to_vec(&fields).ok()?.into())
}

/// Replaces secrets by keyed digests, and the plain digests of a spec with secrets. Whether there was one.
fn redact(fields: &mut Map<String, Value>, key: &DigestKey) -> bool {
    let mut has_secrets = false;
    if let Some(Value::Object(variables)) = fields.get_mut("env") {
        for value in variables.values_mut() {
            if let Some(secret) = value.get("secret").and_then(Value::as_str) {
                *value = json!({"digest": key.keyed_digest(&secret_digest(secret))});
                has_secrets = true;
            }
        }
    }
    for value in fields.values_mut() {
        has_secrets |= match value {
            Value::Object(fields) => redact(fields, key),
            Value::Array(items) => {
                // Every object is redacted, so the count does not stop at the first one.
                let objects = items.iter_mut().filter_map(Value::as_object_mut);
                objects.filter_map(|fields| redact(fields, key).then_some(())).count() > 0
            }
            _ => false,
        };
    }
    if has_secrets {
        // Part of a revision, too short for a key.
        fields.remove("ran");
        if let Some(revision) = fields.get_mut("revision")
            && let Some(plain) = revision.as_str().and_then(|text| text.parse::<SpecRevision>().ok())
        {
            *revision = json!(key.keyed_revision(&plain).to_string());
        }
    }
    has_secrets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_keyed_digests_in_place_of_secrets_and_of_their_plain_digests() {
        let key = DigestKey::new([3; 32]);
        let revision = "v1.00000001.00000002.00000003.00000004.00000005";
        let spec = |env: Value| json!({"labels": {"secret": "a label"}, "env": env});
        let stored = json!({
            "owner": "shop", "ran": 7,
            "given": {"revision": revision, "spec": spec(json!({"A": {"secret": "hunter2"}, "B": {"text": "plain"}}))},
            "sent": {"revision": revision, "spec": spec(json!({"secret": {"text": "plain"}}))},
        });
        let bytes = serde_json::to_vec(&stored).expect("JSON");
        let read = changed(&bytes, |fields| assert!(redact(fields, &key))).expect("an object");
        let text = String::from_utf8_lossy(&read).into_owned();
        let plain = secret_digest("hunter2");
        assert!(!text.contains("hunter2") && !text.contains(&plain), "{text}");
        let read: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(read["given"]["spec"]["env"]["A"], json!({"digest": key.keyed_digest(&plain)}));
        assert_ne!(read["given"]["revision"], revision);
        assert_eq!(read.get("ran"), None);
        for same in ["sent", "owner"] {
            assert_eq!(read[same], stored[same], "{same} has no secret");
        }
        assert_eq!(read["given"]["spec"]["labels"], stored["given"]["spec"]["labels"]);
        assert_eq!(changed(b"not JSON", |_| ()), None);
    }

    #[test]
    fn the_content_of_a_value_follows_from_its_key() {
        for key in ["snap/team/ops/text/s1", "at/gse/snap/team/ops/text/s1", "snap/team/ops/text/"] {
            let prefix = key.strip_suffix("s1").unwrap_or(key);
            assert!(
                matches!(StateContent::of_key(key), StateContent::ManifestText(texts) if texts == prefix),
                "{key}"
            );
        }
        for key in ["snap/ops/inventory/cmdb", "snap/ops/inventory/cmdb:d1:0000"] {
            let is_private = |texts: &str| texts == "snap/ops/text/";
            let content = StateContent::of_key(key);
            assert!(matches!(content, StateContent::ManifestText(texts) if is_private(&texts)), "{key}");
        }
        for key in ["journal/shop/r/7", "at/gse/ledger/gse/0:10.0.0.1:web:api"] {
            assert!(matches!(StateContent::of_key(key), StateContent::Specs), "{key}");
        }
        assert!(matches!(StateContent::of_key("left/shop/0:10.0.0.1:web:api"), StateContent::Suspended));
        assert!(matches!(StateContent::of_key("snap/shop/rev/r1"), StateContent::Other));
    }
}
