//! The source check of `--prune`: manifests from another source would delete processes that they never declared.

use std::time::Duration;

use crate::cli::Failure;
use crate::cli::output::print::visible;
use crate::cli::target::ConnectedTarget;
use crate::control::ControllerEvent;
use crate::engine::changed_source;

/// Refuses a source other than that of the owner's active revision, and retries while the state cannot be read.
pub async fn wait_for_same_source(
    live: &ConnectedTarget,
    owner: &str,
    source: &str,
    on_event: &mut (dyn FnMut(ControllerEvent<'_>) + Send),
) -> Result<(), Failure> {
    loop {
        match changed_source(&live.state, owner, source).await {
            Ok(None) => return Ok(()),
            Ok(Some(last)) => return Err(source_changed(owner, &last, source)),
            Err(error) => on_event(ControllerEvent::Failure { why: &error.to_string() }),
        }
        on_event(ControllerEvent::Tick);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The failure of --prune with manifests from another source.
pub fn source_changed(owner: &str, last: &str, source: &str) -> Failure {
    let message = format!(
        "owner {owner:?} was last applied from {}, and these manifests are from {}: --prune could delete processes \
         that they never declared",
        visible(last),
        visible(source)
    );
    Failure::refused("SourceChanged", message).hint("pass --accept-source to accept the new source")
}
