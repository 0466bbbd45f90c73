//! Process row of the gateway, with the registered and the live spec.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::value::RawValue;

use super::read;
use super::secret_keys::SecretKeyRing;
use crate::backend::BackendError;
use crate::contract::{GatewayProcess, ReportedSpec, RunReport};
use crate::gse::request::SpecWire;
use crate::model::{
    DigestKey, DigestKeyRef, EnvValue, HashedSpec, Health, KnownSpec, LastRun, ObservedInstance,
    ObservedSpecs, Protection, RunningProcess, Spec, SpecRevision, Time,
};

/// The observed instance of a row. Without the key of its digests, its specs are unknown.
pub(super) fn observed_instance(
    row: &GatewayProcess<&RawValue>,
    keys: &SecretKeyRing,
    specs: &mut HashMap<String, Arc<HashedSpec>>,
) -> Result<ObservedInstance, BackendError> {
    let mut labels = row.labels.clone();
    let protections =
        labels.remove("abide_protect").map(|text| Protection::of_label(&text)).unwrap_or_default();
    let digest_key = row.secret_key.as_deref().map(|id| keys.get(id));
    let key = digest_key.as_ref().and_then(DigestKeyRef::known);
    let is_known = digest_key.is_none() || key.is_some();
    let plain = |revision: SpecRevision| key.map_or(revision, |key| key.plain_revision(&revision));
    let mut version = |raw: Option<&RawValue>,
                       redacted: Option<&RawValue>,
                       revision: Option<SpecRevision>| match (raw, redacted) {
        (Some(raw), _) => known(raw.get(), &labels, None, specs, whole).map(KnownSpec::Full),
        (None, _) if !is_known => Ok(KnownSpec::Unknown),
        (None, Some(redacted)) => {
            known(redacted.get(), &labels, key, specs, self::redacted).map(KnownSpec::Full)
        }
        (None, None) => Ok(revision.map_or(KnownSpec::Unknown, |one| KnownSpec::Digests(plain(one)))),
    };
    let given = version(row.spec.flatten(), row.spec_redacted, row.revision)?;
    let live = match row.running {
        true => version(row.live_spec.flatten(), row.live_spec_redacted, row.live_revision)?,
        false => KnownSpec::Unknown,
    };
    let specs = ObservedSpecs {
        registered: given,
        live,
        is_live_assumed: row.live_spec_unknown && row.running,
        ran: match &row.ran {
            Some(RunReport::With { .. }) if !is_known => LastRun::Unknown,
            ran => last_run(ran.as_ref(), plain),
        },
        drifted_files: row.drifted_files(),
        protections,
        digest_key: digest_key.clone(),
    };
    Ok(observed_facts(Facts {
        unknown: row.unknown,
        registered: row.registered,
        hosted: row.hosted,
        running: row.running,
        completed: row.completed,
        pid: row.pid,
        owner: row.owner.as_deref(),
        health: &row.health,
        since: row.since.as_deref(),
        report_time: row.report_time.as_deref().and_then(crate::clock::read),
        labels,
        specs,
    }))
}

/// The facts of a row, in either form.
pub(super) struct Facts<'a> {
    pub unknown: bool,
    pub registered: bool,
    pub hosted: bool,
    pub running: bool,
    pub completed: bool,
    pub pid: Option<u32>,
    pub owner: Option<&'a str>,
    pub health: &'a str,
    pub since: Option<&'a str>,
    pub report_time: Option<Time>,
    pub labels: BTreeMap<String, String>,
    pub specs: ObservedSpecs,
}

pub(super) fn observed_facts(row: Facts<'_>) -> ObservedInstance {
    ObservedInstance {
        unknown: row.unknown,
        registered: Some(row.registered),
        hosted: Some(row.hosted),
        running: Some(row.running),
        completed: row.completed,
        labels: row.labels,
        owner: row.owner.map(Arc::from),
        health: Health::ALL.into_iter().find(|one| one.word() == row.health).unwrap_or_default(),
        since: row.since.and_then(crate::clock::read),
        report_time: row.report_time,
        specs: row.specs,
        process: RunningProcess { pid: row.pid, started: None, not_owned: false },
    }
}

/// The last run of a row; `None`: the row does not say. `plain`: the plain form of its digests.
pub(super) fn last_run(ran: Option<&RunReport>, plain: impl Fn(SpecRevision) -> SpecRevision) -> LastRun {
    match ran {
        None => LastRun::Unknown,
        Some(RunReport::Word(word)) if word == "never" => LastRun::Never,
        Some(RunReport::Word(_)) => LastRun::Unknown,
        Some(RunReport::With { revision, .. }) => {
            revision.map_or(LastRun::Given, |revision| LastRun::Digest(plain(revision).run))
        }
    }
}

/// Parses a spec. The key is that of its digests.
type ParseSpec = fn(&str, &BTreeMap<String, String>, Option<&DigestKey>) -> Result<HashedSpec, BackendError>;

/// Cache of parsed specs: thousands of rows share one spec.
fn known(
    text: &str,
    labels: &BTreeMap<String, String>,
    key: Option<&DigestKey>,
    specs: &mut HashMap<String, Arc<HashedSpec>>,
    parse: ParseSpec,
) -> Result<Arc<HashedSpec>, BackendError> {
    let name = format!("{text}{labels:?}{}", key.map_or("", DigestKey::id));
    if let Some(spec) = specs.get(&name) {
        return Ok(Arc::clone(spec));
    }
    let spec = Arc::new(parse(text, labels, key)?);
    specs.insert(name, Arc::clone(&spec));
    Ok(spec)
}

fn whole(
    text: &str,
    labels: &BTreeMap<String, String>,
    _key: Option<&DigestKey>,
) -> Result<HashedSpec, BackendError> {
    spec(&read::<SpecWire>(text)?, labels).map(HashedSpec::new)
}

/// A spec with plain digests.
fn redacted(
    text: &str,
    labels: &BTreeMap<String, String>,
    key: Option<&DigestKey>,
) -> Result<HashedSpec, BackendError> {
    let wire: ReportedSpec<SpecWire> = read(text)?;
    let bytes = u128::from_str_radix(&wire.sum, 16);
    let sum = bytes.map_err(|_| BackendError::invalid_response("invalid response: sum is not hex"))?;
    let (mut spec, sum) = (spec(&wire.spec, labels)?, sum.to_be_bytes());
    let Some(key) = key else { return Ok(HashedSpec::redacted(spec, wire.revision, sum)) };
    for value in spec.env.values_mut() {
        if let EnvValue::Digest(digest) = value {
            *digest = key
                .plain_digest(digest)
                .ok_or_else(|| BackendError::invalid_response("invalid response: a digest is not hex"))?;
        }
    }
    Ok(HashedSpec::redacted(spec, key.plain_revision(&wire.revision), key.plain_sum(sum)))
}

fn spec(wire: &SpecWire, labels: &BTreeMap<String, String>) -> Result<Spec, BackendError> {
    let mut spec = wire
        .spec()
        .map_err(|wrong| BackendError::invalid_response(format!("invalid spec in the response: {wrong}")))?;
    spec.labels = labels.clone();
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gse::spec_body;
    use crate::model::{AutoType, Dialect, Identity, Monitor, Secret, secret_digest};

    fn wanted(secret: &str) -> HashedSpec {
        let identity = Identity {
            proc_name: "api".to_owned(),
            setup_path: "/".to_owned(),
            pid_path: "/run/api.pid".to_owned(),
            user: Some("www".to_owned()),
            ..Identity::default()
        };
        let monitor = Monitor { auto_type: AutoType::Resident, ..Monitor::default() };
        let env = BTreeMap::from([("TOKEN".to_owned(), EnvValue::Secret(Secret::new(secret.to_owned())))]);
        HashedSpec::new(Spec { identity, monitor, env, ..Spec::default() })
    }

    /// The row of a process with a secret. Without a key: as a gateway of an earlier version answers.
    fn row(key: Option<&DigestKey>) -> String {
        let whole = wanted("hunter2");
        let plain = secret_digest("hunter2");
        let digest = key.and_then(|key| key.keyed_digest(&plain)).unwrap_or(plain);
        let mut spec = Spec::clone(&whole);
        spec.env.insert("TOKEN".to_owned(), EnvValue::Digest(digest));
        let revision = key.map_or(*whole.revision(), |key| key.keyed_revision(whole.revision()));
        let sum = key.map_or(whole.sum(), |key| key.keyed_sum(whole.sum()));
        let redacted = json!({"spec": spec_body(&spec, Dialect::Abide), "revision": revision,
                              "sum": format!("{:032x}", u128::from_be_bytes(sum))});
        json!({
            "instance": "0:10.0.0.1:web:api", "namespace": "web", "name": "api", "host": "0:10.0.0.1", "labels": {},
            "registered": true, "hosted": true, "running": true, "pid": 7, "owner": "shop", "revision": revision,
            "live_revision": revision, "secret_key": key.map(DigestKey::id), "health": "Healthy", "hosting": "Hosted",
            "since": null, "report_time": null, "spec": null, "spec_redacted": redacted, "live_spec": null,
            "live_spec_redacted": redacted,
        })
        .to_string()
    }

    fn observed(key: Option<&DigestKey>, known: bool) -> ObservedInstance {
        let keys = SecretKeyRing::default();
        let hex_keys = key.filter(|_| known).map(|key| (key.id().to_owned(), hex::encode(key.expose())));
        keys.add(&hex_keys.into_iter().collect());
        let text = row(key);
        observed_instance(&read(&text).expect("a row"), &keys, &mut HashMap::new()).expect("an instance")
    }

    #[test]
    fn digests_with_a_known_key_and_without_a_key_compare_alike() {
        let key = DigestKey::new([5; 32]);
        for seen in [observed(Some(&key), true), observed(None, true)] {
            for version in [&seen.specs.registered, &seen.specs.live] {
                let spec = version.spec().expect("a whole spec");
                assert!(spec.is_equivalent(&wanted("hunter2")) && !spec.is_equivalent(&wanted("other")));
                assert!(**spec == wanted("hunter2") && **spec != wanted("other"));
            }
        }
    }

    #[test]
    fn without_the_key_the_specs_are_unknown() {
        let key = DigestKey::new([5; 32]);
        let seen = observed(Some(&key), false);
        assert_eq!((&seen.specs.registered, &seen.specs.live), (&KnownSpec::Unknown, &KnownSpec::Unknown));
        assert_eq!(seen.specs.digest_key, Some(DigestKeyRef::Unknown(key.id().into())));
    }

    #[test]
    fn a_key_whose_id_differs_is_not_used() {
        let keys = SecretKeyRing::default();
        keys.add(&BTreeMap::from([("00000000".to_owned(), hex::encode([5; 32]))]));
        assert_eq!(keys.get("00000000"), DigestKeyRef::Unknown("00000000".into()));
    }
}
