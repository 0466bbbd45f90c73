//! Whose set manifests are: what was typed, else what a Policy says, else the config file. The same for whoever plans once
//! and for whoever stands.

use std::collections::BTreeSet;

use crate::cli::target::TargetArgs;
use crate::cli::{Exit, Failure};
use crate::model::Desired;

/// `None`: nobody says so.
pub fn owner(typed: Option<&str>, desired: &Desired, target: &TargetArgs) -> Result<Option<String>, Failure> {
    let owner = find_owner(typed, desired, target)?;
    // It is a part of keys, beside those of other owners.
    match owner.as_deref().is_some_and(|owner| owner.contains('/') || owner.chars().any(char::is_control)) {
        true => Err(Failure::new(Exit::Usage, format!("{:?} cannot be an owner", owner.unwrap_or_default()))
            .hint("a name without `/` and without control characters can")),
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
            Err(Failure::refused("NotOwned", message).hint("plan each owner's directory by itself"))
        }
        (Some(owner), Some(named), _) if owner != *named => {
            let message =
                format!("a policy says that this set belongs to {named:?}, and --owner says {owner:?}");
            Err(Failure::refused("NotOwned", message).hint("leave --owner out, or change the policy"))
        }
        (Some(owner), _, _) => Ok(Some(owner.to_owned())),
        (None, Some(named), _) => Ok(Some((*named).to_owned())),
        (None, None, _) => target.owner(),
    }
}

/// What is removed must be somebody's by name, except on the machine's own system.
pub fn may_prune(owner: Option<&str>, is_local: bool) -> Result<(), Failure> {
    if is_local || owner.is_some_and(|owner| owner != "default") {
        return Ok(());
    }
    let message = "--prune removes what belongs to an owner, and `default` may be anybody";
    Err(Failure::refused("OwnerNotNamed", message).hint("name the owner: --owner NAME, or a Policy's owner"))
}
