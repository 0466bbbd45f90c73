//! The pure core. So far: what a change of each field of a spec asks for, the digests made of it, how two specs
//! differ, and the choice of operations for one instance.
//!
//! ```text
//! old spec ┐                    Situation ┐
//!          ├─diff→ [Change] ─→ Delta ─→   ├─choose(Goal, Caps)→ [(Op, Which)] or Held
//! new spec ┘                              ┘
//! ```

pub mod caps;
pub mod choose;
pub mod diff;
pub mod effect;

pub use caps::Caps;
pub use choose::{Delta, Goal, Held, Op, Ran, Situation, Which, choose};
pub use diff::{Change, changes, delta, delta_of_revisions};
pub use effect::{effect_of, revision, table};
