//! The policy file of the control host: `--policy FILE`, read like the body of a Policy document.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::cli::{Exit, Failure};
use crate::error_chain::chain;
use crate::manifest::{Code, Excerpt, Loaded, Problem, Severity};
use crate::model::{Allow, Amount, Budgets, ControlHostPolicy, SignatureRule};
use crate::permissions::{own_uid, refuse_changeable};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    #[serde(rename = "apiVersion")]
    api_version: Option<String>,
    kind: Option<String>,
    meta: PolicyMeta,
    owner: Option<String>,
    #[serde(default)]
    allow: AllowEntry,
    #[serde(default)]
    budgets: BudgetsEntry,
    windows: Option<serde_yaml::Value>,
    signatures: Option<SignaturesEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SignaturesEntry {
    allowed_signers: PathBuf,
    #[serde(default = "one")]
    required: u32,
    targets: Option<Vec<String>>,
    owners: Option<Vec<String>>,
}

fn one() -> u32 {
    1
}

impl SignaturesEntry {
    /// `file`: the policy, to whose folder a relative path of the signers refers.
    fn read(self, wrong: impl Fn(&str) -> Failure, file: &Path) -> Result<SignatureRule, Failure> {
        let SignaturesEntry { allowed_signers, required, targets, owners } = self;
        let hint = "signatures: {allowed_signers: FILE, required: 2, targets: [prod], owners: [shop]}";
        if required == 0 {
            return Err(wrong("signatures.required is 0; it must be at least 1").hint(hint));
        }
        for (name, patterns) in [("targets", &targets), ("owners", &owners)] {
            if patterns.as_ref().is_some_and(Vec::is_empty) {
                let message = format!("signatures.{name} is empty: no plan would need a signature");
                return Err(wrong(&message).hint(hint));
            }
        }
        let allowed_signers = file.parent().unwrap_or(Path::new("")).join(allowed_signers);
        if !allowed_signers.is_file() {
            let shown = allowed_signers.display();
            return Err(wrong(&format!("signatures.allowed_signers {shown} is not a file")).hint(hint));
        }
        Ok(SignatureRule { allowed_signers, required, targets, owners })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyMeta {
    name: String,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AllowEntry {
    namespaces: Option<Vec<String>>,
    hosts: Option<Vec<String>>,
    users: Option<Vec<String>>,
    paths: Option<Vec<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct BudgetsEntry {
    delete: Option<AmountEntry>,
    restart: Option<AmountEntry>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum AmountEntry {
    Number(u64),
    Text(String),
}

impl AmountEntry {
    fn read(self, wrong: impl Fn(&str) -> Failure, field: &str) -> Result<Amount, Failure> {
        match self {
            AmountEntry::Number(count) => Ok(Amount::Count(count)),
            AmountEntry::Text(text) => text
                .parse()
                .map_err(|_| wrong(&format!("budgets.{field} {text:?} is not a number or a percentage"))),
        }
    }
}

/// Reads a policy. Another user who could change the file could widen it, so such a file is refused.
pub fn read_policy(file: &Path) -> Result<Arc<ControlHostPolicy>, Failure> {
    let wrong = |why: &str| Failure::new(Exit::Usage, format!("--policy {}: {why}", file.display()));
    let changeable = |why: String| wrong(&why).hint("a policy belongs to root or to this user alone");
    refuse_changeable(file, own_uid()).map_err(|error| changeable(chain(&error)))?;
    let text = std::fs::read_to_string(file).map_err(|error| wrong(&error.to_string()))?;
    let read: PolicyFile = serde_yaml::from_str(&text).map_err(|error| wrong(&error.to_string()))?;
    if read.kind.as_deref().is_some_and(|kind| kind != "Policy") {
        return Err(wrong("kind is not Policy"));
    }
    if read.api_version.as_deref().is_some_and(|version| version != "abide/v1") {
        return Err(wrong("apiVersion is not abide/v1"));
    }
    if read.windows.is_some() {
        return Err(wrong("windows is not supported in a policy file")
            .hint("write windows into a Policy of the manifests"));
    }
    let signatures = read.signatures.map(|entry| entry.read(wrong, file)).transpose()?;
    let amount = |entry: Option<AmountEntry>, field| entry.map(|entry| entry.read(wrong, field)).transpose();
    let AllowEntry { namespaces, hosts, users, paths } = read.allow;
    Ok(Arc::new(ControlHostPolicy {
        name: read.meta.name,
        file: file.display().to_string(),
        owner: read.owner,
        allow: Allow { namespaces, users, hosts },
        paths,
        budgets: Budgets {
            delete: amount(read.budgets.delete, "delete")?,
            restart: amount(read.budgets.restart, "restart")?,
        },
        signatures,
    }))
}

/// Adds a problem for each process that a policy does not allow.
pub fn check_policy(policy: &ControlHostPolicy, loaded: &mut Loaded) {
    let mut found = BTreeSet::new();
    for (key, want) in &loaded.desired.instances {
        if let Some(message) = policy.violation(key, Some(&want.spec)) {
            found.insert((want.origin.place.clone(), message));
        }
    }
    loaded.problems.extend(found.into_iter().map(|(place, message)| Problem {
        file: place.file,
        line: place.line,
        column: place.column,
        severity: Severity::Error,
        code: Code::PolicyViolated,
        message,
        hint: Some("the policy of the control host decides; no manifest can widen it".to_owned()),
        excerpt: Excerpt::default(),
    }));
}

/// Refuses another owner than that of the policy.
pub fn check_owner(policy: &ControlHostPolicy, owner: &str) -> Result<(), Failure> {
    match policy.owner.as_deref().filter(|allowed| *allowed != owner) {
        Some(allowed) => {
            let (name, file) = (&policy.name, &policy.file);
            let message = format!("policy {name:?} ({file}) does not allow owner {owner:?}");
            Err(Failure::refused("PolicyViolated", message)
                .hint(format!("the owner in the policy is {allowed:?}")))
        }
        None => Ok(()),
    }
}
