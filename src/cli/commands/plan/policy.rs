//! The policy files of the control host, read like the body of a Policy document: its administrator's, which always
//! holds, and `--policy FILE`.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use crate::cli::{Exit, Failure};
use crate::error_chain::chain;
use crate::manifest::{Code, Excerpt, Loaded, Problem, Severity};
use crate::model::{Allow, Amount, Budgets, ControlHostPolicy, SignatureRule};
use crate::permissions::{own_uid, refuse_changeable};

const ROOT: u32 = 0;

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
    /// `file`: the policy, to whose folder a relative path of the signers refers. `trusted`: the user who may change both.
    fn read(
        self,
        wrong: impl Fn(&str) -> Failure,
        file: &Path,
        trusted: u32,
    ) -> Result<SignatureRule, Failure> {
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
        let shown = allowed_signers.display();
        if !allowed_signers.is_file() {
            return Err(wrong(&format!("signatures.allowed_signers {shown} is not a file")).hint(hint));
        }
        if trusted != own_uid() {
            // Later checks would accept a file of this user.
            refuse_changeable(&allowed_signers, trusted)
                .map_err(|error| wrong(&format!("signatures.allowed_signers {shown}: {}", chain(&error))))?;
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

/// The policy of the host's administrator. A user can neither leave it out nor replace it.
const HOST_FILE: &str = "/etc/abide/policy.yaml";

/// Reads the policy of the host, if there is one, and the one that the command names.
pub fn read_policies(named: Option<&Path>) -> Result<Option<Arc<ControlHostPolicy>>, Failure> {
    let host = Path::new(HOST_FILE);
    let exists = match host.symlink_metadata() {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) => return Err(Failure::new(Exit::Usage, format!("policy {HOST_FILE}: {error}"))),
    };
    let and = match exists {
        true => Some(Arc::new(read_policy(host, &format!("policy {HOST_FILE}"), ROOT)?)),
        false => None,
    };
    let is_host = |file: &Path| exists && file.canonicalize().ok() == host.canonicalize().ok();
    let Some(file) = named.filter(|file| !is_host(file)) else { return Ok(and) };
    let policy = read_policy(file, &format!("--policy {}", file.display()), own_uid())?;
    Ok(Some(Arc::new(ControlHostPolicy { and, ..policy })))
}

/// Reads a policy. Another user who could change the file could widen it, so such a file is refused.
fn read_policy(file: &Path, name: &str, trusted: u32) -> Result<ControlHostPolicy, Failure> {
    let wrong = |why: &str| Failure::new(Exit::Usage, format!("{name}: {why}"));
    let changeable = |why: String| {
        wrong(&why).hint(match trusted == own_uid() {
            true => "a policy belongs to root or to this user alone",
            false => "the policy of a host belongs to root alone",
        })
    };
    refuse_changeable(file, trusted).map_err(|error| changeable(chain(&error)))?;
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
    let signatures = read.signatures.map(|entry| entry.read(wrong, file, trusted)).transpose()?;
    let amount = |entry: Option<AmountEntry>, field| entry.map(|entry| entry.read(wrong, field)).transpose();
    let AllowEntry { namespaces, hosts, users, paths } = read.allow;
    Ok(ControlHostPolicy {
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
        and: None,
    })
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

/// Refuses another owner than that of the policies.
pub fn check_owner(policy: &ControlHostPolicy, owner: &str) -> Result<(), Failure> {
    let refused = |policy: &ControlHostPolicy| Some(policy.owner.clone()?).filter(|allowed| allowed != owner);
    match policy.all().find_map(|policy| Some((policy, refused(policy)?))) {
        Some((ControlHostPolicy { name, file, .. }, allowed)) => {
            let message = format!("policy {name:?} ({file}) does not allow owner {owner:?}");
            Err(Failure::refused("PolicyViolated", message)
                .hint(format!("the owner in the policy is {allowed:?}")))
        }
        None => Ok(()),
    }
}
