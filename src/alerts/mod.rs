//! Alerts: messages about incidents of a controller, by routes to webhooks, commands and Alertmanager.
//!
//! # Theory of operation
//! [`feed`] collects what the controller's events show and its status does not: drift, relaunches, rollouts. Once per
//! second, [`conditions`] derives the current conditions from the status. Each route has a [`tracker`]: a pure state
//! machine of incidents, which decides what is due. A task per route ([`delivery`]) sends one message at a time to its
//! [`receiver`]. The control loop waits for none of them.
//!
//! Nothing is queued: what is due is derived again for each attempt, so an unreachable receiver costs no memory and gets
//! the current state when it is back. Sent incidents are stored ([`sent_incidents`]): a restart, or the next leader,
//! continues where the last one was. Only the leader sends. At least once: a crash between delivery and write repeats
//! one message.
//!
//! Messages contain no command lines, environment values, or output of processes.

pub mod conditions;
pub mod delivery;
pub mod feed;
pub mod message;
pub mod receiver;
mod sent_incidents;
mod sign;
pub mod template;
pub mod tracker;

pub use self::delivery::{AlertRoute, DeliveryBoard, RunningAlerts, start};
pub use self::feed::AlertFeed;
pub use self::receiver::{AlertReceiver, SendError};
pub use self::template::{MessageTemplate, TemplateError};
