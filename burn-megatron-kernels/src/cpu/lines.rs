//! Loops over the values of a row: conversion and addition.

use super::{Element, Real};

/// Converts the values of `from` to the type for computation.
#[inline(always)]
pub(crate) fn widen<E: Element>(from: &[E], into: &mut [E::Wide]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = from.wide();
    }
}

/// Rounds the values of `from` to their storage type.
#[inline(always)]
pub(crate) fn narrow<E: Element>(from: &[E::Wide], into: &mut [E]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into = E::narrow(*from);
    }
}

/// Adds the elements of `part` to the elements of `total`.
#[inline(always)]
pub(crate) fn add<R: Real>(total: &mut [R], part: &[R]) {
    for (total, part) in total.iter_mut().zip(part) {
        *total += *part;
    }
}
