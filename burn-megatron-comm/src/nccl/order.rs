//! How collectives are put in order with what the device computes.

use std::env::{self, VarError};
use std::fmt;

/// The variable that chooses one, for tests and for looking for a fault.
pub(super) const VARIABLE: &str = "BURN_MEGATRON_NCCL_ORDER";

/// How a collective waits for what writes its input, and what reads its result for the collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// By events on CubeCL's own stream: only what needs the result waits.
    Stream,
    /// By events of the whole context: everything on the device waits.
    Context,
    /// By the host, which waits for the device before and after.
    Host,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Order::Stream => "stream",
            Order::Context => "context",
            Order::Host => "host",
        })
    }
}

/// The order that the environment asks for.
///
/// # Errors
/// What it says instead, and what would fit.
pub(super) fn asked() -> Result<Option<Order>, String> {
    read(env::var(VARIABLE))
}

fn read(value: Result<String, VarError>) -> Result<Option<Order>, String> {
    let value = match value {
        Ok(value) => value,
        Err(VarError::NotPresent) => return Ok(None),
        Err(VarError::NotUnicode(value)) => value.to_string_lossy().into_owned(),
    };
    let orders = [Order::Stream, Order::Context, Order::Host];
    match orders.into_iter().find(|order| order.to_string() == value) {
        Some(order) => Ok(Some(order)),
        None => Err(format!(
            "{VARIABLE} is {value:?}; stream, context and host would fit"
        )),
    }
}

/// The one that is asked for, or else the first that is there, with the reasons why not those before it.
///
/// `there` tries one out. The host is always there.
///
/// # Errors
/// Why the one that is asked for is not there.
pub(super) fn choose(
    asked: Option<Order>,
    there: impl Fn(Order) -> Result<(), String>,
) -> Result<(Order, Vec<String>), String> {
    if let Some(order) = asked {
        let missing =
            |reason| format!("the order \"{order}\" was asked for, but cannot be had: {reason}");
        return there(order).map(|()| (order, vec![])).map_err(missing);
    }
    let mut reasons = vec![];
    for order in [Order::Stream, Order::Context] {
        match there(order) {
            Ok(()) => return Ok((order, reasons)),
            Err(reason) => reasons.push(format!("{order}: {reason}")),
        }
    }
    Ok((Order::Host, reasons))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read_as_it_is_written() {
        assert_eq!(read(Err(VarError::NotPresent)), Ok(None));
        for order in [Order::Stream, Order::Context, Order::Host] {
            assert_eq!(read(Ok(order.to_string())), Ok(Some(order)));
        }
        let message = read(Ok("events".into())).unwrap_err();
        for part in [VARIABLE, "\"events\"", "stream, context and host"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_first_that_is_there_is_taken() {
        let but = |missing: &'static [Order]| {
            move |order| match missing.contains(&order) {
                true => Err("no".to_string()),
                false => Ok(()),
            }
        };
        let chosen = |missing| choose(None, but(missing)).unwrap();
        assert_eq!(chosen(&[]), (Order::Stream, vec![]));
        let (order, reasons) = chosen(&[Order::Stream]);
        assert_eq!((order, reasons.len()), (Order::Context, 1));
        let (order, reasons) = chosen(&[Order::Stream, Order::Context]);
        assert_eq!(order, Order::Host);
        assert_eq!(reasons, ["stream: no", "context: no"]);
    }

    #[test]
    fn what_is_asked_for_is_not_replaced() {
        let none = |order| match order {
            Order::Context => Err("no driver has it".to_string()),
            _ => Ok(()),
        };
        assert_eq!(choose(Some(Order::Host), none), Ok((Order::Host, vec![])));
        let message = choose(Some(Order::Context), none).unwrap_err();
        assert!(message.contains("\"context\"") && message.contains("no driver"));
    }
}
