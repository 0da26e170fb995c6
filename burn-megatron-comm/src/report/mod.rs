//! What a failure report is made of: the calls that each rank has made.

pub(crate) mod call_log;
pub(crate) mod flight_recorder;
