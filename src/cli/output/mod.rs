//! Output: stdout and messages (`print`), the non-blocking stderr writer, and logging.

pub mod logging;
pub mod print;
pub mod stderr;
