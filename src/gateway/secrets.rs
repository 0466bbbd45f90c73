//! Secrets of specs: readers get digests, and a caller that sends a digest back means the value that is known here.
//!
//! A row with a secret has no `spec`; `spec_redacted` has digests in place of the values, and the sums that were made with
//! the values, so that a planner compares without them. Values stay with the gateway and the agents.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::registry::RegistryRecord;
use super::{ApiError, Gateway};
use crate::gse::agent_protocol::{OwnedSpec, ReportedRun};
use crate::gse::spec_body;
use crate::model::{Dialect, EnvValue, HashedSpec, InstanceKey, Secret, Spec};
use crate::store::Store;

/// Maximum replaced secrets that are remembered per instance: a rollback sends the digest of one.
const MAX_REMEMBERED: usize = 16;

pub fn has_secrets(spec: &Spec) -> bool {
    spec.env.values().any(|value| matches!(value, EnvValue::Secret(_)))
}

/// A spec for readers, with digests in place of secrets.
pub fn spec_with_digests(spec: &Spec) -> Value {
    match has_secrets(spec) {
        false => spec_body(spec, Dialect::Abide),
        true => {
            let mut spec = spec.clone();
            for value in spec.env.values_mut() {
                if let EnvValue::Secret(secret) = value {
                    *value = EnvValue::Digest(secret.digest());
                }
            }
            spec_body(&spec, Dialect::Abide)
        }
    }
}

/// The same with the digests of the whole, which a reader could only make with the secrets. `labels`: those of the row.
pub fn redacted_spec(spec: &Spec, labels: &BTreeMap<String, String>) -> Value {
    let whole = HashedSpec::new(Spec { labels: labels.clone(), ..spec.clone() });
    let sum = format!("{:032x}", u128::from_be_bytes(whole.sum()));
    json!({"spec": spec_with_digests(spec), "revision": whole.revision().to_string(), "sum": sum})
}

/// Secrets that a record keeps when another spec replaces its own: the newest last.
pub fn secret_history(old: Option<&RegistryRecord>, new: &Spec) -> Vec<Secret> {
    let Some(old) = old else { return Vec::new() };
    let is_new = |secret: &Secret| !values(new).any(|known| known == secret);
    let mut kept: Vec<Secret> = Vec::new();
    for secret in old.secrets.iter().chain(values(&old.given.spec)).filter(|secret| is_new(secret)) {
        kept.retain(|known| known != secret);
        kept.push(secret.clone());
    }
    kept.split_off(kept.len().saturating_sub(MAX_REMEMBERED))
}

fn values(spec: &Spec) -> impl Iterator<Item = &Secret> {
    spec.env.values().filter_map(|value| match value {
        EnvValue::Secret(secret) => Some(secret),
        EnvValue::Text(_) | EnvValue::File(_) | EnvValue::Digest(_) => None,
    })
}

impl<S: Store> Gateway<S> {
    /// Puts values in the place of the digests that a caller sent. `Err`: the variable whose value is not known here.
    pub(super) async fn with_secrets(
        &self,
        instance: &InstanceKey,
        held: OwnedSpec,
    ) -> Result<Result<OwnedSpec, String>, ApiError> {
        if !held.spec.env.values().any(|value| matches!(value, EnvValue::Digest(_))) {
            return Ok(Ok(held));
        }
        let record = self.record(instance).await?;
        let report = self.report(instance).await?;
        let ran = report.as_ref().and_then(|report| match &report.ran {
            Some(ReportedRun::With(held)) => Some(held),
            Some(ReportedRun::Never | ReportedRun::Unknown) | None => None,
        });
        let live = report.as_ref().and_then(|report| report.live.as_ref());
        let given = record.as_ref().map(|record| &record.given);
        let specs = [given, live, ran].into_iter().flatten().flat_map(|held| values(&held.spec));
        let known: Vec<&Secret> = specs.chain(record.iter().flat_map(|record| &record.secrets)).collect();
        let mut spec = Spec::clone(&held.spec);
        for (name, value) in &mut spec.env {
            let EnvValue::Digest(digest) = value else { continue };
            match known.iter().find(|secret| secret.digest() == *digest) {
                Some(secret) => *value = EnvValue::Secret((*secret).clone()),
                None => return Ok(Err(unknown(name))),
            }
        }
        Ok(Ok(OwnedSpec { spec: Arc::new(spec), ..held }))
    }
}

fn unknown(name: &str) -> String {
    format!("env {name}: only a digest was sent, and no secret of this process has it: send the value")
}
