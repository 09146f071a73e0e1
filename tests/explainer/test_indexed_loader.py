"""A report names the index in the data set of the sample that fails, if it is seen."""

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from overflow_fast import IndexedLoader, NonFiniteError, OverflowGuard

SIZE, BAD = 24, 17


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return {"loss": (x * self.weight).exp().mean()}


def values():
    torch.manual_seed(0)
    x = torch.rand(SIZE, 3)
    x[BAD] = 1000.0
    return x


class Fetching(Dataset):
    """Fetches a batch at once."""

    def __init__(self):
        self.x, self.num_fetched = values(), 0

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return (self.x[index],)

    def __getitems__(self, indices):
        self.num_fetched += 1
        return [(each,) for each in self.x[indices]]


def plain(**options):
    return DataLoader(TensorDataset(values()), batch_size=4, **options)


def failed(loader, change=lambda x: x, accumulated=1, model=None):
    """The explanation of the step whose batch has the bad sample."""
    model = Growing() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    guard = OverflowGuard(model, optimizer, explain=True)
    with pytest.raises(NonFiniteError) as error:
        for number, (x, *_) in enumerate(loader):
            model(change(x))["loss"].backward()
            if number % accumulated == accumulated - 1:
                optimizer.step()
                optimizer.zero_grad()
    guard.remove()
    found = error.value.report.explanation
    assert found.sample is not None
    return found


def shuffled():
    return plain(shuffle=True, generator=torch.Generator().manual_seed(3))


def by_batch_sampler():
    sampler = BatchSampler(RandomSampler(range(SIZE)), 3, drop_last=True)
    return DataLoader(TensorDataset(values()), batch_sampler=sampler)


def fetching():
    return DataLoader(Fetching(), batch_size=4, shuffle=True)


LOADERS = (plain, shuffled, by_batch_sampler, fetching)


@pytest.mark.parametrize("make", LOADERS)
def test_the_index_is_that_of_the_sample(make):
    torch.manual_seed(1)
    found = failed(IndexedLoader(make()))
    assert found.sample.dataset == BAD
    assert f"index {BAD} of" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_know_the_indices_too(persistent_workers):
    loader = plain(shuffle=True, num_workers=2, persistent_workers=persistent_workers)
    assert failed(IndexedLoader(loader)).sample.dataset == BAD


@pytest.mark.parametrize("make", LOADERS)
def test_batches_and_their_order_are_the_loaders_own(make):
    torch.manual_seed(1)
    expected = [x for (x,) in make()]
    torch.manual_seed(1)
    loader = make()
    indexed = IndexedLoader(loader)
    assert len(indexed) == len(loader)
    found = [x for (x,) in indexed]
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert type(loader.dataset) in (TensorDataset, Fetching)  # as it was


def test_a_data_set_that_fetches_batches_still_does():
    loader = fetching()
    list(IndexedLoader(loader))
    assert loader.dataset.num_fetched == len(loader)


def test_a_copy_of_the_batch_is_known_by_its_values():
    assert failed(IndexedLoader(plain()), torch.clone).sample.dataset == BAD
    assert failed(IndexedLoader(plain()), torch.Tensor.double).sample.dataset == BAD


def test_of_several_batches_of_a_step_it_is_the_right_one():
    assert failed(IndexedLoader(plain()), accumulated=2).sample.dataset == BAD


def padded(samples):
    """Pads samples with zeros, in their order."""
    return (nn.utils.rnn.pad_sequence([x for (x,) in samples], batch_first=True),)


def test_a_collate_function_that_keeps_the_order_is_seen_to():
    found = failed(IndexedLoader(plain(shuffle=True, collate_fn=padded)))
    assert found.sample.dataset == BAD


# Where it is not known.


@pytest.mark.parametrize("is_reverse", [False, True])
def test_a_collate_function_that_sorts_is_not_believed(is_reverse):
    def by_size(samples):
        return padded(sorted(samples, key=lambda e: e[0].sum(), reverse=is_reverse))

    loader = plain(shuffle=True, collate_fn=by_size)
    assert failed(IndexedLoader(loader)).sample.dataset is None


def test_rows_that_are_equal_tell_no_order():
    def by_size(samples):
        samples.sort(key=lambda each: each[0].sum())
        return [torch.stack(each) for each in zip(*samples, strict=True)]

    data = TensorDataset(values(), torch.ones(SIZE))
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=by_size)
    assert failed(IndexedLoader(loader)).sample.dataset is None


def test_a_constant_tells_no_batch_from_others():
    class Masked(Growing):
        def forward(self, given):
            return super().forward(given["x"] * given["mask"][:, :3])

    data = TensorDataset(values(), torch.ones(SIZE, 9))

    def turned():
        first = DataLoader(data, sampler=[BAD, 0, 1, 2], batch_size=4)
        for x, mask in IndexedLoader(first):
            yield ({"x": x.flip(0), "mask": mask},)

    assert failed(turned(), model=Masked()).sample.dataset is None


def test_a_data_set_that_leaves_samples_out_is_not_believed():
    class Leaving(Fetching):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[1:]

    loader = DataLoader(Leaving(), batch_size=4)
    assert failed(IndexedLoader(loader)).sample.dataset is None


def test_without_it_nothing_is_said():
    found = failed(plain())
    assert found.sample.dataset is None and "of the dataset" not in str(found)


def test_changed_rows_are_no_samples_of_the_data_set():
    assert failed(IndexedLoader(plain()), lambda x: x.flip(0)).sample.dataset is None
    assert failed(IndexedLoader(plain()), lambda x: x.mul_(2)).sample.dataset is None


def test_one_of_two_batches_that_are_alike_is_not_guessed():
    x = values().repeat(2, 1)
    loader = DataLoader(TensorDataset(x), sampler=[BAD, 1, BAD + SIZE, 1], batch_size=2)
    two = list(IndexedLoader(loader))
    assert torch.equal(two[0][0], two[1][0])

    def both():
        first, second = IndexedLoader(loader), iter(IndexedLoader(loader))
        next(second), next(second)
        yield from first
        second.close()

    assert failed(both()).sample.dataset is None


def test_nothing_is_kept_behind_the_iteration():
    indexed = IndexedLoader(plain())
    for _ in indexed:
        assert indexed._noted
        break
    assert not indexed._noted


class Endless(IterableDataset):
    def __iter__(self):
        return iter(values())


def test_what_has_no_indices_is_refused():
    with pytest.raises(TypeError, match="got Endless"):
        IndexedLoader(DataLoader(Endless()))
    with pytest.raises(TypeError, match="got list"):
        IndexedLoader([values()])
    with pytest.raises(TypeError, match="got batch_size=None"):
        IndexedLoader(DataLoader(TensorDataset(values()), batch_size=None))


def test_samples_with_names_have_no_index():
    class Named(dict):
        def __getitem__(self, name):
            return (super().__getitem__(name),)

    data = Named({str(i): x for i, x in enumerate(values())})
    loader = DataLoader(data, sampler=list(data), batch_size=4)
    assert failed(IndexedLoader(loader)).sample.dataset is None
