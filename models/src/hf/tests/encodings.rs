//! Tests of values that are stored differently from the parameters: interleaved halves, FP8, MXFP4, and all experts in
//! one tensor.

use burn_megatron::checkpoint::ElementType;
use half::bf16;
use serde_json::Map;

use super::own_family::ToyConfig;
use super::*;

/// The experts, the width of the residual stream and the inner width of an expert.
const EXPERTS: usize = 3;
const HIDDEN: usize = 64;
const WIDTH: usize = 5;
/// The rows and columns of a matrix in FP8: more than one block, but less than two.
const ROWS: usize = 129;
const COLUMNS: usize = 130;

/// A family whose experts are stored like the experts of gpt-oss.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Packed;

impl HfFamily for Packed {
    type Model = ToyConfig;

    const ALL: &'static [Self] = &[Packed];

    fn names(self) -> HfNames {
        HfNames {
            model_type: "packed",
            architecture: "PackedForCausalLM",
            prefix: "model.",
            embedding: "model.embed.weight",
            output: "lm_head.weight",
            buffers: &[],
        }
    }

    fn of_model(_: &ToyConfig) -> Self {
        Packed
    }

    fn read(self, _: &mut ConfigKeys) -> Result<ToyConfig, HfConfigError> {
        Ok(ToyConfig::default())
    }

    fn write(self, _: &ToyConfig) -> Map<String, Value> {
        Map::new()
    }

    fn tensors(self, _: &ToyConfig) -> Vec<WeightMapping> {
        let experts = WeightMapping {
            interleaved: true,
            ..WeightMapping::whole("up", "model.up", &[EXPERTS, HIDDEN, 2 * WIDTH])
        };
        let bias = WeightMapping {
            interleaved: true,
            keeps_type: true,
            ..WeightMapping::whole("bias", "model.bias", &[EXPERTS, 2 * WIDTH])
        };
        let mut list = vec![experts, bias];
        let output = ("lm_head".into(), ROWS);
        list.extend(WeightMapping::linear("output", COLUMNS, &[output], false));
        list
    }

    fn stored_tensors(self, model: &ToyConfig, has: &dyn Fn(&str) -> bool) -> Vec<WeightMapping> {
        let mut list = self.tensors(model);
        if has("model.up_blocks") {
            list[0].shape = vec![EXPERTS, 2 * WIDTH, HIDDEN];
            list[0].transposed = true;
            list[0].encoding = WeightEncoding::Mxfp4;
        }
        list
    }
}

fn bf16s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let values = values.into_iter().map(bf16::from_f32);
    values.flat_map(bf16::to_le_bytes).collect()
}

/// Returns tensors in bf16, except for the bias. Each value is its index.
fn counted() -> Stored {
    let up = [EXPERTS, HIDDEN, 2 * WIDTH];
    let places = |count: usize| (0..count).map(|place| place as f32);
    let bias = places(EXPERTS * 2 * WIDTH).flat_map(f32::to_le_bytes);
    // Integers that are exact in bf16.
    let small = |count| places(count).map(|place| place % 251.0);
    BTreeMap::from([
        (
            "model.up".into(),
            ("BF16".into(), up.into(), bf16s(small(up.iter().product()))),
        ),
        (
            "model.bias".into(),
            ("F32".into(), vec![EXPERTS, 2 * WIDTH], bias.collect()),
        ),
        (
            "lm_head.weight".into(),
            (
                "BF16".into(),
                vec![ROWS, COLUMNS],
                bf16s(small(ROWS * COLUMNS)),
            ),
        ),
    ])
}

fn folder_of(tensors: Stored) -> (Temporary, HfFolder<Packed>) {
    let temporary = Temporary::new();
    fs::write(temporary.path("config.json"), r#"{"model_type": "packed"}"#).unwrap();
    write_tensors(&temporary.path("model.safetensors"), tensors);
    let folder = HfFolder::open_family(&temporary.0).unwrap();
    (temporary, folder)
}

/// Returns the values of a whole parameter in bf16.
fn values(folder: &HfFolder<Packed>, key: &str) -> Vec<f32> {
    assert_eq!(folder.tensor(key).unwrap().dtype, ElementType::Bf16);
    let bytes = whole(folder, key);
    let (values, _) = bytes.as_chunks();
    let values = values.iter().copied().map(bf16::from_le_bytes);
    values.map(f32::from).collect()
}

/// Checks that slices are equal to slices of the complete tensor, and that reading them reads the expected number of
/// bytes.
fn assert_slices(folder: &HfFolder<Packed>, key: &str, slices: &[(&[usize], &[usize], u64)]) {
    let all = whole(folder, key);
    let meta = folder.tensor(key).unwrap();
    for (offset, shape, bytes) in slices {
        let slice = TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        let before = folder.bytes_read();
        let read = folder.read(key, &slice).unwrap();
        assert_eq!(folder.bytes_read() - before, *bytes, "{key} {slice:?}");
        let wanted = cut(&all, &meta.shape, &slice, meta.dtype.size());
        assert_eq!(read, wanted, "{key} {slice:?}");
    }
}

#[test]
fn halves_that_alternate_are_set_apart_and_joined_again() {
    let (temporary, folder) = folder_of(counted());
    let up = values(&folder, "model/up");
    for (at, value) in up.iter().enumerate() {
        let (row, column) = (at / (2 * WIDTH), at % (2 * WIDTH));
        let stored = row * 2 * WIDTH + 2 * (column % WIDTH) + column / WIDTH;
        assert_eq!(*value, (stored % 251) as f32, "row {row}, column {column}");
    }
    // The slices are columns 1 and 2 of the first half of an expert, then the complete expert, then each half.
    let row = 2 * WIDTH as u64 * 2;
    let slices: [(&[_], &[_], _); 3] = [
        (&[1, 3, 1], &[1, 4, 2], 4 * 2 * 2 * 2),
        (&[2, 0, WIDTH], &[1, HIDDEN, WIDTH], HIDDEN as u64 * row),
        (&[0, 7, 3], &[3, 1, 4], 3 * 4 * 2 * 2),
    ];
    assert_slices(&folder, "model/up", &slices);

    let same = temporary.path("same");
    let options = ExportOptions::default();
    export(&folder, folder.config(), &same, &options, &mut |_| {}).unwrap();
    assert_eq!(stored(&same), counted());
    let checkpoint = import(&folder, &temporary.path("checkpoint"), &mut |_| {}).unwrap();
    assert_eq!(whole(&checkpoint, "model/up"), whole(&folder, "model/up"));
    // The tensor keeps its dtype.
    let options = ExportOptions {
        dtype: Some(ElementType::F32),
        ..options
    };
    let wide = temporary.path("wide");
    export(&folder, folder.config(), &wide, &options, &mut |_| {}).unwrap();
    assert_eq!(stored(&wide)["lm_head.weight"].0, "F32");
    let options = ExportOptions {
        dtype: Some(ElementType::Bf16),
        ..options
    };
    let narrow = temporary.path("narrow");
    let wide = HfFolder::<Packed>::open_family(&wide).unwrap();
    export(&wide, wide.config(), &narrow, &options, &mut |_| {}).unwrap();
    assert_eq!(stored(&narrow), counted());
}

/// The values of E2M1 codes, from OCP Microscaling Formats 1.0.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

#[test]
fn mxfp4_is_decoded_exactly() {
    let (rows, groups) = (EXPERTS * 2 * WIDTH, HIDDEN / 32);
    let mut codes: Vec<u8> = (0..rows * HIDDEN / 2)
        .map(|at| (at * 7 + at / 16 * 3) as u8)
        .collect();
    codes[0] = 0x10;
    let scales: Vec<u8> = (0..rows * groups).map(|at| 110 + at as u8 % 37).collect();
    let mut tensors = counted();
    tensors.remove("model.up");
    let shape = vec![EXPERTS, 2 * WIDTH, groups];
    tensors.insert(
        "model.up_blocks".into(),
        ("U8".into(), [&shape[..], &[16]].concat(), codes.clone()),
    );
    tensors.insert(
        "model.up_scales".into(),
        ("U8".into(), shape, scales.clone()),
    );
    let (temporary, folder) = folder_of(tensors.clone());
    let up = values(&folder, "model/up");
    assert_eq!(up.len(), EXPERTS * HIDDEN * 2 * WIDTH);
    for (at, value) in up.iter().enumerate() {
        let (expert, hidden, column) = (
            at / (HIDDEN * 2 * WIDTH),
            at / (2 * WIDTH) % HIDDEN,
            at % (2 * WIDTH),
        );
        let row = expert * 2 * WIDTH + 2 * (column % WIDTH) + column / WIDTH;
        let code = codes[(row * HIDDEN + hidden) / 2];
        let code = if hidden % 2 == 0 {
            code & 15
        } else {
            code >> 4
        };
        let size = E2M1[usize::from(code & 7)];
        let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
        let scale = i32::from(scales[row * groups + hidden / 32]) - 127;
        assert_eq!(*value, sign * size * 2f32.powi(scale), "{at}");
    }
    assert_eq!((up[0], up[2 * WIDTH]), (0.0, 0.5 * 2f32.powi(110 - 127)));
    let slices: [(&[_], &[_], _); 3] = [
        // The hidden indices 31 and 32 are in two groups. For two pairs of columns, two bytes and two scales are read.
        (&[1, 31, 2], &[1, 2, 2], 2 * 2 * (2 + 2)),
        (&[2, 0, WIDTH], &[1, 32, WIDTH], 2 * WIDTH as u64 * (16 + 1)),
        (&[0, 5, 0], &[1, 1, 1], 2 * (1 + 1)),
    ];
    assert_slices(&folder, "model/up", &slices);
    // The tensor is exported as floats, in the other orientation.
    let to = temporary.path("to");
    let options = ExportOptions::default();
    export(&folder, folder.config(), &to, &options, &mut |_| {}).unwrap();
    assert_eq!(stored(&to)["model.up"].1, [EXPERTS, HIDDEN, 2 * WIDTH]);
    let again = HfFolder::<Packed>::open_family(&to).unwrap();
    assert_eq!(values(&again, "model/up"), up);

    let refusal = |change: &dyn Fn(&mut Stored)| {
        let (temporary, mut tensors) = (Temporary::new(), tensors.clone());
        change(&mut tensors);
        fs::write(temporary.path("config.json"), r#"{"model_type": "packed"}"#).unwrap();
        write_tensors(&temporary.path("model.safetensors"), tensors);
        let refused = HfFolder::<Packed>::open_family(&temporary.0).unwrap_err();
        refused.to_string()
    };
    let error = refusal(&|tensors| drop(tensors.remove("model.up_scales")));
    assert!(error.contains(" has no model.up_scales"), "{error}");
    let error = refusal(&|tensors| tensors.get_mut("model.up_scales").unwrap().0 = "I8".into());
    assert!(
        error.ends_with("model.up_scales has elements of I8: expected U8"),
        "{error}"
    );
    let error = refusal(&|tensors| {
        let blocks = tensors.get_mut("model.up_blocks").unwrap();
        blocks.1 = vec![EXPERTS, 2 * WIDTH, 16, groups];
    });
    assert!(
        error.contains("model.up_blocks has the shape [3, 10, 16, 2]"),
        "{error}"
    );
}

/// Decodes E4M3 by its definition (arXiv:2209.05433).
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 128 == 0 { size } else { -size }
}

#[test]
fn fp8_is_scaled_by_blocks_and_rounded_once() {
    // NaN codes are left out, because NaN is not equal to itself.
    let codes: Vec<u8> = (0..ROWS * COLUMNS)
        .map(|at| (at * 31 + at / COLUMNS) as u8)
        .map(|code| if code & 127 == 127 { 0 } else { code })
        .collect();
    let scales = [1.7f32, 0.3, -2.9e-3, 711.3];
    let mut tensors = counted();
    let shape = vec![ROWS, COLUMNS];
    tensors.insert(
        "lm_head.weight".into(),
        ("F8_E4M3".into(), shape, codes.clone()),
    );
    let bytes = scales
        .iter()
        .flat_map(|scale| scale.to_le_bytes())
        .collect();
    tensors.insert(
        "lm_head.weight_scale_inv".into(),
        ("F32".into(), vec![2, 2], bytes),
    );
    let (temporary, folder) = folder_of(tensors.clone());
    let weight = values(&folder, "model/output.weight");
    for row in 0..ROWS {
        for column in 0..COLUMNS {
            let scale = scales[row / 128 * 2 + column / 128];
            let wanted = bf16::from_f32(e4m3(codes[row * COLUMNS + column]) * scale);
            let found = weight[column * ROWS + row];
            assert_eq!(found, f32::from(wanted), "row {row}, column {column}");
        }
    }
    let slices: [(&[_], &[_], _); 3] = [
        (&[127, 127], &[2, 2], 4 + 4 * 4),
        (&[128, 0], &[2, 128], 2 * 128 + 4),
        (&[3, 5], &[1, 1], 1 + 4),
    ];
    assert_slices(&folder, "model/output.weight", &slices);
    let checkpoint = import(&folder, &temporary.path("checkpoint"), &mut |_| {}).unwrap();
    let key = "model/output.weight";
    assert_eq!(whole(&checkpoint, key), whole(&folder, key));

    let refusal = |change: &dyn Fn(&mut Stored)| {
        let (temporary, mut tensors) = (Temporary::new(), tensors.clone());
        change(&mut tensors);
        fs::write(temporary.path("config.json"), r#"{"model_type": "packed"}"#).unwrap();
        write_tensors(&temporary.path("model.safetensors"), tensors);
        let refused = HfFolder::<Packed>::open_family(&temporary.0).unwrap_err();
        refused.to_string()
    };
    let scales = "lm_head.weight_scale_inv";
    let error = refusal(&|tensors| drop(tensors.remove(scales)));
    assert!(error.contains(&format!(" has no {scales}")), "{error}");
    let error = refusal(&|tensors| tensors.get_mut(scales).unwrap().1 = vec![4, 1]);
    assert!(error.contains("has the shape [4, 1]"), "{error}");
    let error = refusal(&|tensors| tensors.get_mut(scales).unwrap().0 = "U32".into());
    assert!(
        error.ends_with("has elements of U32: expected F32 or BF16"),
        "{error}"
    );
}

/// The files of Qwen 3 in FP8 contain such scales.
#[test]
fn scales_of_fp8_may_be_bf16() {
    let codes: Vec<u8> = (0..ROWS * COLUMNS).map(|at| (at % 126) as u8).collect();
    let scales = [1.7f32, 0.3, -2.9e-3, 711.3];
    let output = |dtype: &str, scales: Vec<u8>| {
        let mut tensors = counted();
        let weight = ("F8_E4M3".into(), vec![ROWS, COLUMNS], codes.clone());
        tensors.insert("lm_head.weight".into(), weight);
        let scales = (dtype.into(), vec![2, 2], scales);
        tensors.insert("lm_head.weight_scale_inv".into(), scales);
        values(&folder_of(tensors).1, "model/output.weight")
    };
    let rounded = scales.map(|scale| bf16::from_f32(scale).to_f32());
    let wide = rounded.iter().flat_map(|scale| scale.to_le_bytes());
    assert_eq!(output("BF16", bf16s(scales)), output("F32", wide.collect()));
}

/// Fuses experts like `transformers` 5 in memory: `gate_up_proj` `[experts, 2 width, hidden]` and `down_proj`
/// `[experts, hidden, width]`.
fn fuse(tensors: &mut Stored, module: &str, linears: [&str; 3]) {
    let names: Vec<_> = tensors.keys().cloned().collect();
    let experts = format!(".{module}.experts.");
    for name in names {
        let Some((layer, rest)) = name.split_once(&format!(".{module}.")) else {
            continue;
        };
        let value = tensors.remove(&name).unwrap();
        if !name.contains(&experts) {
            tensors.insert(format!("{layer}.mlp.{rest}"), value);
            continue;
        }
        // The tensors are visited in the order of their names: gate and down (or down and gate), followed by up.
        let [expert, linear] = *rest.splitn(3, '.').skip(1).collect::<Vec<_>>() else {
            panic!("{name}")
        };
        let part = linears
            .iter()
            .position(|known| linear == format!("{known}.weight"));
        let into = ["gate_up_proj", "gate_up_proj", "down_proj"][part.unwrap()];
        let (dtype, shape, bytes) = value;
        let rows = shape[0] * if into == "down_proj" { 1 } else { 2 };
        let fused = tensors
            .entry(format!("{layer}.mlp.experts.{into}"))
            .or_insert((dtype, vec![4, rows, shape[1]], vec![]));
        let half = if part == Some(1) { bytes.len() } else { 0 };
        let step = if into == "down_proj" { 1 } else { 2 } * bytes.len();
        let at = expert.parse::<usize>().unwrap() * step + half;
        fused.2.resize(4 * step, 0);
        fused.2[at..at + bytes.len()].copy_from_slice(&bytes);
    }
}

#[test]
fn experts_in_one_tensor_are_those_of_their_own() {
    for (name, module, linears) in [
        ("mixtral", "block_sparse_moe", ["w1", "w3", "w2"]),
        ("qwen3-moe", "mlp", ["gate_proj", "up_proj", "down_proj"]),
    ] {
        let copy = rewrite(name, |tensors| fuse(tensors, module, linears));
        let names: Vec<_> = stored(&copy.0).into_keys().collect();
        let fused = "model.layers.1.mlp.experts.gate_up_proj".to_string();
        assert!(names.contains(&fused), "{names:?}");
        let (own, fused) = (open(name), HfFolder::open(&copy.0).unwrap());
        assert_eq!(own.keys(), fused.keys());
        for key in own.keys() {
            assert_eq!(own.tensor(&key), fused.tensor(&key));
            assert_eq!(whole(&own, &key), whole(&fused, &key), "{name} {key}");
        }
        // The export writes a separate tensor per expert.
        let to = copy.path("to");
        let options = ExportOptions::default();
        export(&fused, fused.config(), &to, &options, &mut |_| {}).unwrap();
        assert_eq!(stored(&to), stored(&fixture(name)), "{name}");
    }
}
