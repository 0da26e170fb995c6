//! Round trips of tensors and objects.

use super::*;
use proptest::prelude::*;
use proptest::sample::{Index, select};

const TYPES: [ElementType; 7] = [
    ElementType::F64,
    ElementType::F32,
    ElementType::F16,
    ElementType::Bf16,
    ElementType::I64,
    ElementType::I32,
    ElementType::U8,
];

/// Cuts slices in two at random, until there are enough slices or no slice can be cut.
fn partition(shape: &[usize], cuts: &[(Index, Index, Index)]) -> Vec<TensorSlice> {
    let mut slices = vec![TensorSlice::whole(shape)];
    for (which, dim, at) in cuts {
        if shape.is_empty() {
            break;
        }
        let chosen = which.index(slices.len());
        let dim = dim.index(shape.len());
        let len = slices[chosen].shape[dim];
        if len < 2 {
            continue;
        }
        let at = 1 + at.index(len - 1);
        let mut rest = slices[chosen].clone();
        slices[chosen].shape[dim] = at;
        rest.offset[dim] += at;
        rest.shape[dim] -= at;
        slices.push(rest);
    }
    slices
}

fn any_box(shape: &[usize], numbers: &[(Index, Index)]) -> TensorSlice {
    let dims = shape.iter().zip(numbers).map(|(len, (a, b))| {
        let start = a.index(len + 1);
        (start, b.index(len - start + 1))
    });
    let (offset, shape) = dims.unzip();
    TensorSlice { offset, shape }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Random tensors, cut into random slices over random parts, are read in different slices.
    #[test]
    fn any_box_is_read_from_any_pieces(
        shapes in prop::collection::vec(
            (select(TYPES.to_vec()), prop::collection::vec(0usize..7, 0..4)), 1..5),
        cuts in prop::collection::vec(any::<(Index, Index, Index)>(), 0..12),
        ranks in 1usize..5,
        places in prop::collection::vec(any::<Index>(), 13),
        reads in prop::collection::vec(prop::collection::vec(any::<(Index, Index)>(), 4), 6),
    ) {
        let named = shapes.iter().enumerate();
        let tensors: Vec<_> = named.map(|(i, (dtype, shape))| whole(&format!("model/{i}"), *dtype, shape)).collect();
        let mut parts = vec![vec![]; ranks];
        for (number, tensor) in tensors.iter().enumerate() {
            for (shard, slice) in partition(&tensor.meta.shape, &cuts).into_iter().enumerate() {
                let rank = places[(number + shard) % places.len()].index(ranks);
                parts[rank].push((number, slice));
            }
        }
        let temp = scratch();
        let folder = temp.path();
        let folder = CheckpointFolder::create(folder).unwrap();
        let pending = folder.begin(3).unwrap();
        let joined = folder.join(pending.name()).unwrap();
        write(&joined, &tensors, &parts);
        let published = pending.publish(ranks, &metadata(3), &Retention::default(), WAIT).unwrap();
        let read = Checkpoint::open(folder.path()).unwrap();
        prop_assert_eq!(published.manifest(), read.manifest());
        prop_assert_eq!(read.metadata(), &metadata(3));
        for tensor in &tensors {
            let (key, shape) = (&tensor.meta.key, &tensor.meta.shape);
            prop_assert_eq!(read.tensor(key), Some(tensor.meta.clone()));
            prop_assert_eq!(&read.read(key, &TensorSlice::whole(shape)).unwrap(), &tensor.bytes);
            for numbers in &reads {
                let slice = any_box(shape, numbers);
                prop_assert_eq!(read.read(key, &slice).unwrap(), tensor.of(&slice));
                // The memory contains other data before the read.
                let mut memory = vec![0xa5; tensor.of(&slice).len()];
                read.read_into(key, &slice, &mut memory).unwrap();
                prop_assert_eq!(memory, tensor.of(&slice));
            }
        }
        for rank in 0..ranks {
            prop_assert_eq!(read.object(&format!("rank {rank}")).unwrap(), vec![rank as u8; 5]);
        }
        let totals = read.verify(&mut |_| {}).unwrap();
        let elements = tensors.iter().map(|tensor| tensor.bytes.len() / tensor.meta.dtype.size());
        prop_assert_eq!(totals.elements, elements.sum::<usize>() as u64);
        prop_assert_eq!(totals.objects, ranks);
    }
}

#[test]
fn other_programs_can_read_the_files() {
    let temp = scratch();
    let folder = temp.path();
    let saved = saved(folder);
    let bytes = fs::read(saved.path().join("part-00000.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort();
    assert_eq!(
        names,
        ["model/a.weight [0..3, 0..2]", "model/b", "object/rank 0"]
    );
    let view = file.tensor("model/a.weight [0..3, 0..2]").unwrap();
    assert_eq!(
        (view.dtype(), view.shape()),
        (safetensors::Dtype::F32, &[3, 2][..])
    );
    assert_eq!(view.data(), small().0[0].of(&slice(&[0, 0], &[3, 2])));
    let text = fs::read_to_string(saved.path().join("manifest.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["about"]["step"], 7);
    assert_eq!(json["tensors"][0]["key"], "model/a.weight");
}

#[test]
fn one_piece_is_in_memory_at_a_time_the_widest_first() {
    let temp = scratch();
    let folder = temp.path();
    let folder = CheckpointFolder::create(folder).unwrap();
    let pending = folder.begin(1).unwrap();
    let types = [
        ElementType::U8,
        ElementType::F32,
        ElementType::F64,
        ElementType::F32,
    ];
    let named = types.iter().enumerate();
    let tensors: Vec<_> = named
        .map(|(i, dtype)| whole(&format!("{i}"), *dtype, &[3]))
        .collect();
    let shards: Vec<_> = tensors
        .iter()
        .map(|tensor| TensorShard {
            tensor: tensor.meta.clone(),
            slice: TensorSlice::whole(&[3]),
        })
        .collect();
    let mut calls = vec![];
    let data = |index: usize| {
        calls.push(index);
        Ok(tensors[index].bytes.clone())
    };
    pending.write_part(0, &shards, &[], data).unwrap();
    assert_eq!(calls, [2, 1, 3, 0]);
    let saved = pending
        .publish(1, &metadata(1), &Retention::default(), WAIT)
        .unwrap();
    for tensor in &saved.manifest().tensors {
        let aligned = tensor.shards[0]
            .begin
            .is_multiple_of(tensor.dtype.size() as u64);
        assert!(aligned, "{}", tensor.key);
    }
}

#[test]
fn memory_of_another_length_is_refused() {
    let temp = scratch();
    let folder = temp.path();
    let checkpoints = CheckpointFolder::create(folder).unwrap();
    let checkpoint = save(&checkpoints, 1, &Retention::default());
    let all = slice(&[1], &[2]);
    let right = checkpoint.read("model/b", &all).unwrap().len();
    for len in [0, right - 1, right + 1] {
        let error = checkpoint.read_into("model/b", &all, &mut vec![0; len]);
        assert!(
            matches!(error, Err(CheckpointError::Length { .. })),
            "{error:?}"
        );
    }
}

#[test]
fn what_is_not_touched_is_not_checked() {
    let temp = scratch();
    let folder = temp.path();
    let folder = CheckpointFolder::create(folder).unwrap();
    // Three chunks.
    let tensor = whole("big", ElementType::F32, &[2 * CHECKSUM_CHUNK / 4 + 9]);
    let pending = folder.begin(1).unwrap();
    write(
        &pending,
        std::slice::from_ref(&tensor),
        &[vec![(0, TensorSlice::whole(&tensor.meta.shape))]],
    );
    let saved = pending
        .publish(1, &metadata(1), &Retention::default(), WAIT)
        .unwrap();
    let shard = &saved.manifest().tensors[0].shards[0];
    assert_eq!(shard.checksums.len(), 3);
    let path = saved.path().join("part-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    bytes[shard.begin as usize + 2 * CHECKSUM_CHUNK + 3] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let across = slice(&[CHECKSUM_CHUNK / 4 - 5], &[10]);
    assert_eq!(saved.read("big", &across).unwrap(), tensor.of(&across));
    for last in [
        slice(&[2 * CHECKSUM_CHUNK / 4 - 1], &[2]),
        slice(&[2 * CHECKSUM_CHUNK / 4 + 5], &[2]),
    ] {
        let text = saved.read("big", &last).unwrap_err().to_string();
        let place = "part-00000.safetensors: chunk 3 of 3 of big";
        assert!(text.contains(place), "{text}");
    }
    assert_eq!(saved.faults(&mut |_| {}).len(), 1);
}

#[test]
fn other_files_have_the_same_content() {
    let temp = scratch();
    let folder = temp.path();
    let first = saved(&folder.join("first"));
    let text = reshard(
        &first,
        &CheckpointFolder::open(folder.join("first")).unwrap(),
        FileSizes::Files(1),
        &mut |_| {},
    )
    .unwrap_err()
    .to_string();
    assert!(
        text.contains("first already has a checkpoint of step 7"),
        "{text}"
    );
    for sizes in [
        FileSizes::Files(2),
        FileSizes::Files(1),
        FileSizes::MaxBytes(50),
    ] {
        let mut written = 0;
        let to = CheckpointFolder::create(folder.join(format!("{sizes:?}"))).unwrap();
        let second = reshard(&first, &to, sizes, &mut |bytes| written += bytes).unwrap();
        assert_eq!(written, 58);
        assert_eq!(second.metadata(), first.metadata());
        let shards = second
            .manifest()
            .tensors
            .iter()
            .map(|tensor| tensor.shards.len());
        assert_eq!(shards.collect::<Vec<_>>(), [1, 1]);
        let files = if sizes == FileSizes::Files(1) { 1 } else { 2 };
        assert_eq!(second.totals().files, files);
        assert_small(&second);
        let comparison = compare(&first, &second, &mut |_| {}).unwrap();
        assert!(comparison.is_same() && comparison.same == 2);
        assert_eq!(first.objects(), second.objects());
        assert_eq!(second.object("rank 1").unwrap(), [1; 5]);
    }
}

#[test]
fn differences_are_counted() {
    let temp = scratch();
    let folder = temp.path();
    let of = |name: &str, tensors: &[(&str, ElementType, Vec<u8>)]| {
        let folder = CheckpointFolder::create(folder.join(name)).unwrap();
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(key, dtype, bytes)| TestTensor {
                meta: TensorMeta {
                    key: (*key).into(),
                    dtype: *dtype,
                    shape: vec![bytes.len() / dtype.size()],
                },
                bytes: bytes.clone(),
            })
            .collect();
        let shards = tensors
            .iter()
            .enumerate()
            .map(|(i, tensor)| (i, TensorSlice::whole(&tensor.meta.shape)));
        let pending = folder.begin(1).unwrap();
        write(&pending, &tensors, &[shards.collect()]);
        pending
            .publish(1, &metadata(1), &Retention::default(), WAIT)
            .unwrap()
    };
    let floats = |values: &[f32]| {
        values
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let (f32, bf16) = (ElementType::F32, ElementType::Bf16);
    let first = of(
        "a",
        &[
            ("changed", f32, floats(&[1.0, 2.0, 0.0, 5.0])),
            ("gone", f32, floats(&[1.0])),
            ("longer", f32, floats(&[1.0])),
            ("nan", f32, floats(&[1.0, f32::NAN])),
            ("same", f32, floats(&[f32::NAN, 1.0])),
            ("type", f32, floats(&[1.0, 2.5])),
        ],
    );
    let second = of(
        "b",
        &[
            ("changed", f32, floats(&[1.0, 3.0, -0.0, 4.0])),
            ("longer", f32, floats(&[1.0, 2.0])),
            ("nan", f32, floats(&[f32::NAN, f32::NAN])),
            ("new", f32, floats(&[1.0])),
            ("same", f32, floats(&[f32::NAN, 1.0])),
            ("type", bf16, vec![0x80, 0x3f, 0x20, 0x40]),
        ],
    );
    let found = compare(&first, &second, &mut |_| {}).unwrap();
    assert!(!found.is_same());
    assert_eq!(
        (&found.only_first[..], &found.only_second[..]),
        (&["gone".into()][..], &["new".into()][..])
    );
    assert_eq!(found.same, 1);
    let figures: Vec<_> = found
        .different
        .iter()
        .map(|difference| {
            let TensorDifference {
                first,
                elements,
                max_absolute,
                max_relative,
                ..
            } = difference;
            (&first.key[..], *elements, *max_absolute, *max_relative)
        })
        .collect();
    assert_eq!(
        figures,
        [
            ("changed", Some(3), 1.0, 1.0 / 3.0),
            ("longer", None, 0.0, 0.0),
            ("nan", Some(1), f64::INFINITY, f64::INFINITY),
            ("type", Some(0), 0.0, 0.0),
        ]
    );
}
