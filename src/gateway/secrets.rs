//! Spec secrets: readers get digests, and a digest that a caller sends back selects the stored value.
//!
//! A row with a secret has no `spec`; `spec_redacted` has digests in place of the values, and the sums computed with
//! the values, so that a planner can compare without them. Only the gateway and the agents have the values. Every digest of
//! a row is keyed unless [`super::row_digests`] decides otherwise.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::registry::RegistryRecord;
use super::{ApiError, Gateway};
use crate::agent_protocol::{OwnedSpec, ReportedRun};
use crate::contract::ReportedSpec;
use crate::gse::spec_body;
use crate::model::{Dialect, DigestKey, EnvValue, HashedSpec, InstanceKey, Secret, Spec};
use crate::store::Store;

/// Maximum replaced secrets stored per instance: a rollback sends the digest of one.
const MAX_REMEMBERED: usize = 16;

pub fn has_secrets(spec: &Spec) -> bool {
    spec.env.values().any(|value| matches!(value, EnvValue::Secret(_)))
}

/// A spec for readers, with digests in place of secrets. `key`: of the digests; `None`: they are plain.
pub fn spec_with_digests(spec: &Spec, key: Option<&DigestKey>) -> Value {
    match has_secrets(spec) {
        false => spec_body(spec, Dialect::Abide),
        true => {
            let mut spec = spec.clone();
            for value in spec.env.values_mut() {
                if let EnvValue::Secret(secret) = value {
                    let plain = secret.digest();
                    *value = EnvValue::Digest(key.and_then(|key| key.keyed_digest(&plain)).unwrap_or(plain));
                }
            }
            spec_body(&spec, Dialect::Abide)
        }
    }
}

/// Adds the digests of the full spec, which a reader cannot compute without the secrets. `labels`: labels of the row.
pub fn redacted_spec(
    spec: &Spec,
    labels: &BTreeMap<String, String>,
    key: Option<&DigestKey>,
) -> ReportedSpec {
    let whole = HashedSpec::new(Spec { labels: labels.clone(), ..spec.clone() });
    let (sum, revision) = match key {
        None => (whole.sum(), *whole.revision()),
        Some(key) => (key.keyed_sum(whole.sum()), key.keyed_revision(whole.revision())),
    };
    let sum = format!("{:032x}", u128::from_be_bytes(sum));
    ReportedSpec { spec: spec_with_digests(spec, key), revision, sum }
}

/// The stored secrets of a record after a spec change, newest last.
pub fn secret_history(old: Option<&RegistryRecord>, new: &Spec) -> Vec<Secret> {
    let Some(old) = old else { return Vec::new() };
    let is_new = |secret: &Secret| !values(new).any(|known| known == secret);
    let mut secrets: Vec<Secret> = Vec::new();
    for secret in old.secrets.iter().chain(values(&old.given.spec)).filter(|secret| is_new(secret)) {
        secrets.retain(|known| known != secret);
        secrets.push(secret.clone());
    }
    secrets.split_off(secrets.len().saturating_sub(MAX_REMEMBERED))
}

fn values(spec: &Spec) -> impl Iterator<Item = &Secret> {
    spec.env.values().filter_map(|value| match value {
        EnvValue::Secret(secret) => Some(secret),
        EnvValue::Text(_) | EnvValue::File(_) | EnvValue::Exec(_) | EnvValue::Digest(_) => None,
    })
}

impl<S: Store> Gateway<S> {
    /// Replaces digests in a spec by their values. `Err`: a variable has no stored value.
    pub(super) async fn with_secrets(
        &self,
        instance: &InstanceKey,
        held: OwnedSpec,
    ) -> Result<Result<OwnedSpec, UnknownSecret>, ApiError> {
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
                None => return Ok(Err(UnknownSecret { name: name.clone() })),
            }
        }
        Ok(Ok(OwnedSpec { spec: Arc::new(spec), ..held }))
    }
}

/// A variable of which only the digest is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "env {name}: the spec has only a digest, and no stored secret of this process matches it: send the value"
)]
pub(super) struct UnknownSecret {
    name: String,
}
