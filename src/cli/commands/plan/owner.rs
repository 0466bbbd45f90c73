//! Owner resolution: from --owner, else from a Policy, else from the config file.
//!
//! `plan`, `apply`, `watch` and `up` resolve it the same way.

use std::collections::BTreeSet;

use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::model::{DEFAULT_OWNER, Desired};

/// `None`: no flag, Policy or config file names an owner.
pub fn owner(typed: Option<&str>, desired: &Desired, target: &TargetArgs) -> Result<Option<String>, Failure> {
    let owner = find_owner(typed, desired, target)?;
    // The owner is a segment of store keys.
    match owner.as_deref().is_some_and(|owner| owner.contains('/') || owner.chars().any(char::is_control)) {
        true => Err(Failure::new(Exit::Usage, format!("invalid owner {:?}", owner.unwrap_or_default()))
            .hint("an owner has no `/` and no control characters")),
        false => Ok(owner),
    }
}

fn find_owner(
    typed: Option<&str>,
    desired: &Desired,
    target: &TargetArgs,
) -> Result<Option<String>, Failure> {
    let named: BTreeSet<&str> =
        desired.policies.iter().filter_map(|policy| policy.owner.as_deref()).collect();
    match (typed, named.first(), named.len()) {
        (_, _, 2..) => {
            let message = format!("policies name several owners: {}", Vec::from_iter(named).join(", "));
            Err(Failure::refused("NotOwned", message).hint("plan each owner's directory separately"))
        }
        (Some(owner), Some(named), _) if owner != *named => {
            let message =
                format!("a Policy names the owner {named:?} for these manifests, and --owner is {owner:?}");
            Err(Failure::refused("NotOwned", message).hint("omit --owner, or change the Policy"))
        }
        (Some(owner), _, _) => Ok(Some(owner.to_owned())),
        (None, Some(named), _) => Ok(Some((*named).to_owned())),
        (None, None, _) => target.owner(),
    }
}

/// Requires a named owner for --prune, except on the local system.
pub fn may_prune(owner: Option<&str>, is_local: bool) -> Result<(), Failure> {
    if is_local || owner.is_some_and(|owner| owner != DEFAULT_OWNER) {
        return Ok(());
    }
    let message = "--prune needs a named owner: several teams may share the owner `default`";
    Err(Failure::refused("OwnerNotNamed", message).hint("name the owner: --owner NAME, or a Policy's owner"))
}
