//! The CubeCL kernels. A unit reads or writes complete words of codes.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::Coding;
use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, empty, launch};
use crate::fp8::format::{Format, Rounding};
use crate::fp8::kernel as code;

/// The number of units per cube. Units share no data, so any number that fills a multiprocessor works.
const UNITS: u32 = 256;

/// The distribution of values and words over units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CodecPlan {
    /// The number of values per load or store.
    vector: usize,
    /// The number of loads or stores per unit.
    loads: usize,
    /// The number of words per unit.
    words: usize,
    /// Whether the last unit has fewer values than its words can hold.
    ragged: bool,
}

impl CodecPlan {
    fn new(client: &Client, dtype: DType, count: usize, coding: Coding) -> Self {
        let per_word = coding.per_word();
        // If every word is full, the widest vectors of the device are used, otherwise single values.
        let whole = count.is_multiple_of(per_word);
        let vector = RowPlan::new(client, dtype, if whole { count } else { 1 }).vector;
        Self::of(vector, coding, !whole)
    }

    fn of(vector: usize, coding: Coding, ragged: bool) -> Self {
        let per_word = coding.per_word();
        let values = vector.max(per_word);
        Self {
            vector,
            loads: values / vector,
            words: values / per_word,
            ragged,
        }
    }

    /// Returns the number of units for `count` values.
    fn units(&self, count: usize) -> usize {
        count.div_ceil(self.loads * self.vector)
    }
}

#[cube]
fn code_of(value: f32, #[comptime] coding: Coding) -> u32 {
    match comptime!(coding) {
        Coding::Value(format) => code::encode(value, format),
        Coding::Scale(rounding) => code::e8m0_encode(value, rounding),
    }
}

#[cube]
fn value_of(code: u32, #[comptime] coding: Coding) -> f32 {
    match comptime!(coding) {
        Coding::Value(format) => code::decode(code, format),
        Coding::Scale(_rounding) => code::e8m0_decode(code),
    }
}

/// Encodes the values of a unit. `count` is the total number of values, and `units` is the number of units.
#[cube(launch_unchecked)]
fn encode_kernel<F: Float, N: Size, M: Size>(
    values: &[Vector<F, N>],
    codes: &mut [Vector<u32, M>],
    count: u32,
    units: u32,
    #[comptime] plan: CodecPlan,
    #[comptime] coding: Coding,
    #[define(F)] _dtype: ElemType,
) {
    let unit = CUBE_POS * UNITS as usize + UNIT_POS as usize;
    let (vector, loads) = comptime!((plan.vector, plan.loads));
    let first = unit * loads;
    let count = count as usize;
    if unit < units as usize {
        let mut loaded = Array::<Vector<f32, N>>::new(loads);
        #[unroll]
        for load in 0..loads {
            let at = first + load;
            if comptime!(!plan.ragged) {
                loaded[load] = Vector::cast_from(values[at]);
            } else {
                // The unused part of the last word is 0, because 0 has the code 0 in all formats.
                loaded[load] = Vector::cast_from(0.0f32);
                if at < count {
                    loaded[load] = Vector::cast_from(values[at]);
                }
            }
        }
        let mut words = Vector::<u32, M>::empty();
        let (bits, per_word) = comptime!((coding.bits(), coding.per_word()));
        #[unroll]
        for word in 0..plan.words {
            let mut packed = 0u32;
            #[unroll]
            for place in 0..per_word {
                let at = comptime!(word * per_word + place);
                let value = loaded[comptime!(at / vector)].extract(comptime!(at % vector));
                packed |= code_of(value, coding) << comptime!(bits * place as u32);
            }
            words.insert(word, packed);
        }
        codes[unit] = words;
    }
}

/// Decodes the values of a unit. `count` is the total number of values, and `units` is the number of units.
#[cube(launch_unchecked)]
fn decode_kernel<F: Float, N: Size, M: Size>(
    codes: &[Vector<u32, M>],
    values: &mut [Vector<F, N>],
    count: u32,
    units: u32,
    #[comptime] plan: CodecPlan,
    #[comptime] coding: Coding,
    #[define(F)] _dtype: ElemType,
) {
    let unit = CUBE_POS * UNITS as usize + UNIT_POS as usize;
    let (vector, loads) = comptime!((plan.vector, plan.loads));
    let first = unit * loads;
    let count = count as usize;
    if unit < units as usize {
        let words = codes[unit];
        let (bits, per_word) = comptime!((coding.bits(), coding.per_word()));
        #[unroll]
        for store in 0..loads {
            let mut decoded = Vector::<f32, N>::empty();
            #[unroll]
            for lane in 0..vector {
                let at = comptime!(store * vector + lane);
                let word = words.extract(comptime!(at / per_word));
                let code = word >> comptime!(bits * (at % per_word) as u32);
                decoded.insert(lane, value_of(code, coding));
            }
            if comptime!(!plan.ragged) {
                values[first + store] = Vector::cast_from(decoded);
            } else {
                if first + store < count {
                    values[first + store] = Vector::cast_from(decoded);
                }
            }
        }
    }
}

/// Encodes contiguous values. See [`encode`](super::encode).
pub(super) fn encode(values: CubeTensor, coding: Coding) -> CubeTensor {
    let client = values.client.clone();
    let count = values.shape().num_elements();
    let codes = empty(&values, [count.div_ceil(coding.per_word())], DType::U32);
    if count == 0 {
        return codes;
    }
    let dtype = values.dtype;
    let plan = CodecPlan::new(&client, dtype, count, coding);
    unsafe {
        launch!(
            encode_kernel,
            [client, plan.units(count).div_ceil(UNITS as usize), UNITS],
            [plan.vector, plan.words],
            [values, &codes],
            (count as u32, plan.units(count) as u32),
            (plan, coding, dtype_to_storage_type(dtype))
        );
    }
    codes
}

/// Decodes contiguous codes that hold at least `count` values. See [`decode`](super::decode).
pub(super) fn decode(codes: CubeTensor, count: usize, dtype: DType, coding: Coding) -> CubeTensor {
    let client = codes.client.clone();
    let values = empty(&codes, [count], dtype);
    if count == 0 {
        return values;
    }
    let plan = CodecPlan::new(&client, dtype, count, coding);
    unsafe {
        launch!(
            decode_kernel,
            [client, plan.units(count).div_ceil(UNITS as usize), UNITS],
            [plan.vector, plan.words],
            [codes, &values],
            (count as u32, plan.units(count) as u32),
            (plan, coding, dtype_to_storage_type(dtype))
        );
    }
    values
}

/// Adds AOT instances that encode and decode every format from and to every type, and the E8M0 scales.
pub(crate) fn aot_instances(list: &mut AotList) {
    for (format, coding) in [
        ("e4m3", Coding::Value(Format::E4M3)),
        ("e5m2", Coding::Value(Format::E5M2)),
        ("e2m1", Coding::Value(Format::E2M1)),
        ("e8m0", Coding::Scale(Rounding::Up)),
    ] {
        for (name, dtype, vector) in types() {
            let plan = CodecPlan::of(vector, coding, false);
            instance!(
                list.streaming("fp8/encode/{name}/{format}"), UNITS,
                encode_kernel::EncodeKernel [_ _ _ _] (vector, plan.words, plan, coding, dtype)
            );
            // The kernel reads a quarter or half of the bytes that it writes.
            instance!(
                list.other("fp8/decode/{name}/{format}"), UNITS,
                decode_kernel::DecodeKernel [_ _ _ _] (vector, plan.words, plan, coding, dtype)
            );
        }
    }
}
