//! Is it still the same source? What is pruned by manifests from elsewhere was, more often than not, never theirs.

use std::time::Duration;

use crate::cli::Failure;
use crate::cli::output::print::visible;
use crate::cli::target::ConnectedTarget;
use crate::control::{ControllerEvent, revisions};
use crate::store::Error;

/// Refuses another source than the one that the owner's processes were last taken from.
pub async fn check_source(live: &ConnectedTarget, owner: &str, source: &str) -> Result<(), Failure> {
    match compare(live, owner, source).await {
        Ok(same) => same,
        Err(error) => Err(live.failure(&error)),
    }
}

/// The same for somebody who stands by until it can be asked.
pub async fn wait_for_same_source(
    live: &ConnectedTarget,
    owner: &str,
    source: &str,
    told: &mut (dyn FnMut(ControllerEvent<'_>) + Send),
) -> Result<(), Failure> {
    loop {
        match compare(live, owner, source).await {
            Ok(same) => return same,
            Err(error) => told(ControllerEvent::Failure { why: &error.to_string() }),
        }
        told(ControllerEvent::Tick);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

async fn compare(live: &ConnectedTarget, owner: &str, source: &str) -> Result<Result<(), Failure>, Error> {
    let last = revisions::active(&live.state, owner).await?.0;
    let Some(last) = last.filter(|last| last.source != source) else { return Ok(Ok(())) };
    let message = format!(
        "{owner:?} was last applied from {}, and these manifests are from {}: --prune could remove what they never knew",
        visible(&last.source),
        visible(source)
    );
    Ok(Err(Failure::refused("SourceChanged", message)
        .hint("if that is meant, --accept-source takes the new one")))
}
