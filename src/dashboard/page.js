(() => {
  const live = document.getElementById('live');
  const say = (text) => { live.textContent = '· ' + text; };
  let timer = null, again = false;
  const refresh = async () => {
    try {
      const answer = await fetch('/', { cache: 'no-store' });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
      document.getElementById('main').replaceWith(document.adoptNode(page.getElementById('main')));
      document.title = page.title;
    } catch (error) { say('unreachable'); }
    timer = null;
    if (again) { again = false; soon(); }
  };
  const soon = () => { if (timer) { again = true; } else { timer = setTimeout(refresh, 250); } };
  const last = document.getElementById('main').dataset.last;
  const source = new EventSource('/api/v1/events?after=' + last);
  source.onopen = () => say('live');
  source.onmessage = soon;
  source.addEventListener('missed', soon);
  source.onerror = () => say('connecting');
  setInterval(soon, 30000);
})();
