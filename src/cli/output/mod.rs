//! Output: stdout and messages (`print`), tables, the non-blocking stderr writer, and logging.

pub mod logging;
pub mod print;
pub mod stderr;
pub mod table;
