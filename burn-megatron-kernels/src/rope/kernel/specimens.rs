//! The kernels with typical sizes, for compiling them with no device at hand.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::latent::{in_vectors, keys_back_kernel, keys_kernel};
use super::turn::turn_kernel;
use super::{Plan, UNITS};
use crate::cube::SPLITS;
use crate::cube::specimen::{Specimen, Target, tensor, types};
use crate::rope::{Heads, Latent, Pairing};

/// Grouped heads of 128 features, and DeepSeek's latent attention.
pub(crate) fn specimens(target: &Target) -> Vec<Specimen> {
    let mut specimens = vec![];
    for dtype in types() {
        for pairing in [Pairing::Halves, Pairing::Interleaved] {
            specimens.extend(turns(target, dtype, pairing));
            specimens.extend(latents(target, dtype, pairing));
        }
    }
    specimens
}

type Type = (&'static str, ElemType, usize);

/// 32 queries and 8 keys turn, 8 values pass; in place in every split, and with positions for every
/// token.
fn turns(target: &Target, (name, dtype, vector): Type, pairing: Pairing) -> Vec<Specimen> {
    let heads = Heads {
        heads: 48,
        features: 128,
        turned: 40,
        first: 0,
        width: 128,
        pairing,
    };
    let plan = Plan::with_vector(heads, vector);
    let turn = |plan: Plan, each, items, units| {
        let (device, compiler) = target.properties();
        turn_kernel::TurnKernel::new(
            target.settings(units),
            device,
            compiler,
            tensor(),
            tensor(),
            tensor(),
            each,
            tensor(),
            (),
            (),
            (),
            (),
            (),
            plan.vector,
            plan.lanes,
            plan,
            items,
            units,
            dtype,
        )
    };
    let each = turn(
        plan,
        ComptimeOptionCompilationArg::Some(tensor()),
        plan.turning() + plan.passing(),
        UNITS,
    );
    let each = Specimen::streaming(format!("rope/each/{name}/{pairing:?}"), each);
    let in_place = SPLITS.map(|split| {
        let plan = plan.grouped(split.each);
        let none = ComptimeOptionCompilationArg::None;
        let kernel = turn(plan, none, plan.turning(), split.units);
        Specimen::streaming(format!("rope/in_place/{name}/{pairing:?}-{split}"), kernel)
    });
    core::iter::once(each).chain(in_place).collect()
}

/// 128 heads of 128 and 64 features, and of 128 of a value.
fn latents(target: &Target, (name, dtype, vector): Type, pairing: Pairing) -> [Specimen; 2] {
    let heads = Heads {
        heads: 128,
        features: 192,
        turned: 128,
        first: 128,
        width: 64,
        pairing,
    };
    let plan = Plan::with_vector(heads, vector);
    let latent = Latent {
        nope: 128,
        value: 128,
    };
    let latent = in_vectors(latent, plan);
    let (device, compiler) = target.properties();
    let keys = keys_kernel::KeysKernel::new(
        target.settings(UNITS),
        device.clone(),
        compiler.clone(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        tensor(),
        ComptimeOptionCompilationArg::None,
        tensor(),
        tensor(),
        (),
        (),
        (),
        (),
        (),
        plan.vector,
        plan.lanes,
        plan,
        latent,
        plan.turning(),
        dtype,
    );
    let back = keys_back_kernel::KeysBackKernel::new(
        target.settings(UNITS),
        device,
        compiler,
        tensor(),
        tensor(),
        tensor(),
        ComptimeOptionCompilationArg::None,
        tensor(),
        tensor(),
        (),
        (),
        (),
        (),
        (),
        plan.vector,
        plan.lanes,
        plan,
        latent,
        dtype,
    );
    [
        Specimen::streaming(format!("rope/keys/{name}/{pairing:?}"), keys),
        Specimen::streaming(format!("rope/keys_back/{name}/{pairing:?}"), back),
    ]
}
