//! The engine: applies a desired state to a target, for every command and for the controller.
//!
//! # Theory of operation
//!
//! [`apply`] first resolves steps of an interrupted run ([`recover`]), then observes and plans ([`PlanInput`]). It
//! refuses a plan over a budget, a stale saved plan and a plan that the [`ApplyHandler`] does not confirm. It then
//! takes the writer lease ([`lease`]), recovers and plans again, because the previous holder may have changed
//! instances. The revision is activated ([`activate`]) and the history entry is begun before the first step. The
//! plan is executed, failed rollouts are rolled back ([`rollback`]), and the target is observed until its instances
//! converge or the deadline passes ([`verify`]).
//!
//! [`manual`] operations record a hold instead and need no lease. The controller uses the same parts, one component
//! at a time.
//!
//! The engine prints nothing: progress is an [`ApplyEvent`], the result is a [`Report`].

mod activate;
mod apply;
mod connected;
mod error;
mod input;
mod recover;
mod report;
mod request;
mod run;
mod selection_check;
mod verify;
mod writer_lease;

pub mod history;
pub mod manual;
pub mod other_sources;
pub mod pin;
pub mod protections;
pub mod published_status;
pub mod rollback;
pub mod rollout_records;
pub mod stored_revisions;
pub mod transfer;

pub use self::activate::{Activation, changed_source};
pub use self::apply::apply;
pub use self::connected::{ConnectError, ConnectedTarget, LOCAL_APP, local_endpoint};
pub use self::error::ApplyError;
pub use self::input::{FactSources, PlanDigests, PlanInput, PlanRequest};
pub use self::report::{Conclusion, Report, Unhealthy};
pub use self::request::{ApplyEvent, ApplyHandler, ApplyRequest, ExecutionLimits, SavedPlan, Unattended};
