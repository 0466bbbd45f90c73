//! The source check of `--prune`: manifests from another source would delete processes that they never declared.

use std::time::Duration;

use crate::cli::Failure;
use crate::cli::output::print::visible;
use crate::cli::target::ConnectedTarget;
use crate::control::{ControllerEvent, revisions};
use crate::store::Error;

/// Refuses a source other than that of the owner's active revision.
pub async fn check_source(live: &ConnectedTarget, owner: &str, source: &str) -> Result<(), Failure> {
    match compare(live, owner, source).await {
        Ok(same) => same,
        Err(error) => Err(live.failure(&error)),
    }
}

/// Like [`check_source`], and retries while the state cannot be read.
pub async fn wait_for_same_source(
    live: &ConnectedTarget,
    owner: &str,
    source: &str,
    on_event: &mut (dyn FnMut(ControllerEvent<'_>) + Send),
) -> Result<(), Failure> {
    loop {
        match compare(live, owner, source).await {
            Ok(same) => return same,
            Err(error) => on_event(ControllerEvent::Failure { why: &error.to_string() }),
        }
        on_event(ControllerEvent::Tick);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

async fn compare(live: &ConnectedTarget, owner: &str, source: &str) -> Result<Result<(), Failure>, Error> {
    let last = revisions::active(&live.state, owner).await?.0;
    let Some(last) = last.filter(|last| last.source != source) else { return Ok(Ok(())) };
    let message = format!(
        "owner {owner:?} was last applied from {}, and these manifests are from {}: --prune could delete processes \
         that they never declared",
        visible(&last.source),
        visible(source)
    );
    Ok(Err(Failure::refused("SourceChanged", message).hint("pass --accept-source to accept the new source")))
}
