//! The address of the rendezvous.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A host and a TCP port, written `node1:29500`, `10.0.0.1:29500` or `[fd00::1]:29500`.
///
/// The host is not resolved: `(host, port)` is what [`ToSocketAddrs`](std::net::ToSocketAddrs) takes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A name, an IPv4 address or an IPv6 address without brackets.
    pub host: String,
    /// The port, not 0.
    pub port: u16,
}

/// A text that is not an [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// No host.
    #[error("the host is empty: expected a name such as node1, or an IP address")]
    NoHost,
    /// No colon with a port after the host.
    #[error("\"{0}\" has no port: expected an address such as node1:29500 or [fd00::1]:29500")]
    NoPort(String),
    /// A port that is not a number from 1 to 65535.
    #[error("invalid port \"{0}\": expected 1 to 65535")]
    Port(String),
    /// A host that is not a valid name or IP address.
    #[error(
        "invalid host \"{0}\": expected a name of letters, digits, dots and hyphens, or an IP address"
    )]
    Host(String),
}

impl Address {
    /// An address from host and port. An IPv6 host may have brackets.
    ///
    /// # Errors
    /// [`AddressError::NoHost`], [`AddressError::Host`], and [`AddressError::Port`] for 0.
    pub fn new(host: &str, port: u16) -> Result<Address, AddressError> {
        let host = check_host(host)?;
        if port == 0 {
            return Err(AddressError::Port("0".into()));
        }
        Ok(Address { host, port })
    }

    /// Whether the host is a loopback name or address.
    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.host)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    /// `host:port`; an IPv6 host needs brackets here.
    fn from_str(text: &str) -> Result<Address, AddressError> {
        let no_port = || AddressError::NoPort(text.into());
        let (host, port) = text.rsplit_once(':').ok_or_else(no_port)?;
        // Without brackets the last group of an IPv6 address would be read as the port.
        let bare = host.contains(':') && !host.starts_with('[');
        if bare || port.ends_with(']') {
            return Err(no_port());
        }
        Address::new(host, parse_port(port)?)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A port in decimal digits.
pub(super) fn parse_port(text: &str) -> Result<u16, AddressError> {
    match text.parse() {
        Ok(port @ 1..) if !text.starts_with('+') => Ok(port),
        _ => Err(AddressError::Port(text.into())),
    }
}

/// The host without brackets, if it is valid.
pub(super) fn check_host(text: &str) -> Result<String, AddressError> {
    let inner = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let is_host = match inner {
        Some(inner) => is_ipv6(inner),
        None => is_ipv6(text) || text.parse::<Ipv4Addr>().is_ok() || is_name(text),
    };
    if text.is_empty() {
        Err(AddressError::NoHost)
    } else if is_host {
        Ok(inner.unwrap_or(text).into())
    } else {
        Err(AddressError::Host(text.into()))
    }
}

/// `localhost`, `127.x.x.x` or `::1`.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|host: IpAddr| host.is_loopback())
}

/// With an optional zone (interface name) after a `%`.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = match text.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (text, None),
    };
    address.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(is_label)
}

/// At most 253 characters in labels. The last one has a letter: with digits alone it would have to be
/// an IPv4 address.
fn is_name(text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let numeric = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    let last = text.rsplit('.').next().unwrap_or(text);
    text.len() <= 253 && text.split('.').all(is_label) && !numeric(last)
}

/// 1 to 63 letters, digits, hyphens, and the underscores that some clusters have; no hyphen first.
fn is_label(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=63).contains(&text.len()) && text.bytes().all(is_valid) && !text.starts_with('-')
}
