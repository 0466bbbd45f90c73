//! Observations of a target: its rows, the ledger and recent steps, live status checks, and recovered old specs.
//!
//! A list alone decides nothing destructive. A live status check precedes every stop, restart and removal, and
//! follows every recent step. Instances that the ledger does not prove ours are checked, too.
//!
//! [`Observation::plan_until_stable`] is the one loop of plan and live check: each plan names the specs and facts
//! that it lacks, these are fetched, and the next plan uses them. [`ObservedCache`] keeps an observation current
//! between two passes of a controller.

mod cache;
mod error;
mod live_check;
mod observation;
mod old_specs;
mod stable_plan;
mod target;

pub use self::cache::{ObservedCache, stable_fields};
pub use self::error::{ObserveError, TargetError};
pub use self::observation::{Observation, ObserveRequest};
pub use self::old_specs::{NoHistory, SearchCache, SpecSearch};
pub use self::stable_plan::StablePlanInputs;
pub use self::target::{Target, namespaces, observe_target};
