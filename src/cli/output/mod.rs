//! Output: stdout and messages (`print`), tables, ages, the non-blocking stderr writer, and logging.

pub mod age;
pub mod logging;
pub mod print;
pub mod stderr;
pub mod table;
